"""The requests of an episode to the endpoint of a run, recorded as the tokens that were sampled.

A request continues an earlier one if its conversation repeats the earlier prompt, with its images, and answer: the chat
template renders it with a placeholder for the answer, whose tokens stay as sampled, so that nothing is tokenized again.
Where the conversation was changed, or the template writes it differently, another sequence of the episode begins.
Requests of one episode are numbered in the order of their arrival; the number is the key of their random numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.environment import EnvironmentConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.data.chat.calls import AssistantTurn, function_names, read_reply
from hybrid_rlhf.data.chat.conversation import completion_text
from hybrid_rlhf.data.chat.messages import Message
from hybrid_rlhf.data.chat.reasoning import answer_of
from hybrid_rlhf.data.chat.template import token_ids
from hybrid_rlhf.data.images.expansion import RowImages
from hybrid_rlhf.data.images.references import ImageReference
from hybrid_rlhf.generation.open_batch import TokenSource
from hybrid_rlhf.generation.sampling import Completion, derive_seed
from hybrid_rlhf.rl.environments.episodes import Turns
from hybrid_rlhf.rl.environments.observations import PLACEHOLDER, ids_after_turn
from hybrid_rlhf.rl.images import ImageCatalogue
from hybrid_rlhf.rl.types import Episode
from hybrid_rlhf.runtime.observability.logs import warn_once
from hybrid_rlhf.serving.answers import chat_template
from hybrid_rlhf.serving.bodies import ChatBody, CompletionBody, GenerationBody
from hybrid_rlhf.serving.conversations import request_errors
from hybrid_rlhf.serving.service import Job, Service

_FIXED = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "ignore_eos"),
)
"""Sampling parameters that training needs to know: a request does not change them."""


@dataclass(eq=False)
class _Turn:
    """An answered request."""

    text: str | None
    """Text of the prompt, as rendered; None for token ids."""
    messages: int
    """Number of messages of the conversation; 0 without one."""
    ids: list[int]
    """Tokens of prompt and completion."""
    images: tuple[ImageReference, ...]
    """Those of the prompt."""
    said: str
    """Text of the completion with special tokens."""
    replies: tuple[AssistantTurn, ...]
    """Assistant messages that a later conversation may contain in place of the completion."""
    sequence: Episode


@dataclass(frozen=True)
class _Prompt:
    """A prompt, and the turn that it continues."""

    ids: list[int]
    text: str | None = None
    messages: int = 0
    names: frozenset[str] = frozenset()
    """Functions that may be called."""
    marks: tuple[str, str] | None = None
    """Texts that open and close reasoning, which a reply does not contain."""
    continues: _Turn | None = None
    images: tuple[ImageReference, ...] = ()


class EpisodeService(Service):
    """The service of one episode: any model name, sampled and limited as the run's rollouts are."""

    def __init__(
        self,
        shared: Service,
        turns: Turns,
        *,
        config: EnvironmentConfig,
        sampling: SamplingParams,
        sample: int,
        images: ImageCatalogue,
        image_refusal: str,
    ) -> None:
        """Begin an episode.

        Args:
            shared: service of all episodes of the rollout.
            turns: completes the prompts of this one.
            config: limits of an episode.
            sampling: sampling parameters of the prompt, with its seed.
            sample: index of the episode among those of the prompt.
            images: reads the images of requests.
            image_refusal: why they may have none; empty: they may.
        """
        super().__init__(
            shared.batch,
            shared.tokenizer,
            name=shared.name,
            sampling=replace(sampling, n=1),
            max_queue=shared.max_queue,
            metrics=shared.metrics,
        )
        self._config = config
        self.sample = sample
        self._images = images
        self._image_refusal = image_refusal
        self._seed = sampling.seed or 0
        self._episode_turns = turns
        self._turns: list[_Turn] = []
        self._requested = 0
        self._numbering = threading.Lock()
        self.sequences: list[Episode] = []
        """Sequences of the answered requests."""
        self.overran = False
        """True if a request was refused because the episode had reached its limits."""
        self.closed = False
        """True if nothing more is recorded."""

    def check_name(self, name: str) -> None:
        """Accept every name: programs often have a model name built in."""

    def job(self, body: GenerationBody) -> Job:
        """The generation of a request, continuing an earlier turn where its conversation does.

        Raises:
            UserError: for an invalid request, or when the episode has no room for another turn.
        """
        prompts = self._chat(body) if isinstance(body, ChatBody) else self._plain(body)
        for prompt in prompts:
            self._check(body.prompt_key, prompt)
        asked = self._fixed(body, prompts)
        with self._numbering:
            sampling = self._limited(asked, prompts)
            first = self._requested
            self._requested = self._requested + len(prompts)
        seeds = [derive_seed(self._seed, self.sample, first + place) for place in range(len(prompts))]

        def record(place: int, completion: Completion) -> None:
            if not self.closed:
                self._record(prompts[place], completion, sampling.stop)

        images = [prompt.images for prompt in prompts]
        return Job([prompt.ids for prompt in prompts], sampling, body.alternatives or 0, seeds, record, images=images)

    def _check(self, key: str, prompt: _Prompt) -> None:
        """Refuse tokens that no batch takes; one between two rollouts could not tell."""
        self._check_ids(key, prompt.ids)
        if (layout := self._images.rules.layout) is not None:
            with request_errors(key):
                images = RowImages(layout, [*prompt.images])
                images.require_no_others(prompt.ids, len(prompt.images), self.tokenizer)

    @property
    def image_refusal(self) -> str:
        """As in Service."""
        return self._image_refusal

    def read_images(self, uris: Mapping[str, str]) -> RowImages:
        """Read the images of a request; the run keeps them."""
        with request_errors("messages"):
            return self._images.read("messages", [*uris.values()])

    @property
    def source(self) -> TokenSource:
        """What completes the prompts."""
        return self._episode_turns

    def _fixed(self, body: GenerationBody, prompts: Sequence[_Prompt]) -> SamplingParams:
        """Sampling parameters of a request, with those that training must know replaced by the run's."""
        asked = self.sampling(body, longest_prompt=max(len(prompt.ids) for prompt in prompts))
        if body.response_format is not None or (isinstance(body, ChatBody) and body.required_tools):
            warn_once("a program asks for a response format or a required call: rollout.sampling decides")
        changed = [name for name in _FIXED if getattr(asked, name) != getattr(self.defaults, name)]
        for name in changed:
            warn_once(
                f"a program asks for {name} {getattr(asked, name)}, it is sampled with "
                f"{getattr(self.defaults, name)}: rollout.sampling decides, as training computes its distribution"
            )
        fixed = {name: getattr(self.defaults, name) for name in _FIXED}
        return replace(asked, **fixed, min_new_tokens=0, response_format=self.defaults.response_format)

    def _limited(self, sampling: SamplingParams, prompts: Sequence[_Prompt]) -> SamplingParams:
        room = min(map(self._room, prompts))
        if self._requested + len(prompts) > self._config.max_turns or room < 1:
            self.overran = True
            raise UserError(
                f"an episode has at most environment.max_turns {self._config.max_turns} requests and "
                f"rollout.sampling.max_new_tokens {self.defaults.max_new_tokens} tokens after its prompt, got "
                f"another request after {self._requested} with {max(len(prompt.ids) for prompt in prompts)} tokens: "
                "end the episode"
            )
        limits = (sampling.max_new_tokens, room, self._config.max_turn_tokens or room)
        return replace(sampling, max_new_tokens=min(limits))

    def _room(self, prompt: _Prompt) -> int:
        """Number of tokens that may follow a prompt."""
        begun = prompt.continues
        sequence = len(prompt.ids) if begun is None else len(begun.sequence.prompt)
        limit = self.defaults.max_new_tokens - max(0, len(prompt.ids) - sequence)
        return min(limit, self.batch.max_tokens - len(prompt.ids))

    # -- find the turn that a prompt continues

    def _chat(self, body: ChatBody) -> list[_Prompt]:
        if body.prompt_token_ids is not None:
            return [self._given(body.prompt_token_ids)]
        messages, images = self.conversation(body)
        shown = () if images is None else tuple(images.references)
        tools = body.used_tools
        text = self.rendered(body, messages)
        names = function_names(tools)
        template = chat_template(body, self.tokenizer)
        marks = None if template is None else template.thinking_marks
        for turn in reversed(self._turns) if body.add_generation_prompt and not body.continue_final_message else ():
            rest = self._after(turn, messages, body) if shown[: len(turn.images)] == turn.images else None
            if rest is not None:
                end = turn.ids[-1] if turn.ids[-1] in self._episode_turns.stop_token_ids else None
                if images is not None:
                    (rest,) = images.some(range(len(turn.images), len(shown))).expanded([rest])
                ids = ids_after_turn(rest, self.tokenizer, end_token=end)
                return [_Prompt([*turn.ids, *ids], text, len(messages), names, marks, turn, shown)]
        whole = text if images is None else images.expanded([text])[0]
        return [_Prompt(token_ids(whole, self.tokenizer), text, len(messages), names, marks, images=shown)]

    def _after(self, turn: _Turn, messages: Sequence[Message], body: ChatBody) -> str | None:
        """Text that the template writes after a turn in a later conversation; None if that does not continue the
        turn."""
        place = turn.messages
        if turn.text is None or not 0 < place < len(messages):
            return None
        if not any(reply.is_repeated_by(messages[place]) for reply in turn.replies):
            return None
        shown = [*messages[:place], {"role": "assistant", "content": PLACEHOLDER}, *messages[place + 1 :]]
        try:
            text = self.rendered(body, shown)
        except UserError:  # a template may refuse a tool's result without a call
            return None
        before, _, rest = text.partition(PLACEHOLDER)
        return rest if before.startswith(turn.text) and not before[len(turn.text) :].strip() else None

    def _plain(self, body: GenerationBody) -> list[_Prompt]:
        assert isinstance(body, CompletionBody)
        return [self._text(prompt) if isinstance(prompt, str) else self._given(prompt) for prompt in body.prompts]

    def _text(self, text: str) -> _Prompt:
        for turn in reversed(self._turns):
            if turn.text is not None and not turn.messages and text.startswith(turn.text + turn.said):
                rest = self.tokenizer(text[len(turn.text + turn.said) :], add_special_tokens=False)["input_ids"]
                return _Prompt([*turn.ids, *rest], text, continues=turn)
        return _Prompt(self.encode(text), text)

    def _given(self, ids: list[int]) -> _Prompt:
        continued = [turn for turn in self._turns if ids[: len(turn.ids)] == turn.ids]
        turn = max(continued, key=lambda turn: len(turn.ids), default=None)
        return _Prompt(ids, continues=turn, images=() if turn is None else turn.images)

    # -- record what was sampled

    def _record(self, prompt: _Prompt, completion: Completion, stop: Sequence[str]) -> None:
        ids = completion.token_ids
        begun = prompt.continues
        if begun is not None and len(begun.sequence.ids) == len(begun.ids):
            sequence = begun.sequence
            sequence.add_observation(prompt.ids[len(begun.ids) :])
        else:
            sequence = Episode(list(prompt.ids))
            self.sequences.append(sequence)
        sequence.images = [image.digest for image in prompt.images]
        sequence.add_turn(completion)
        sequence.stopped = completion.finish_reason == "stop"
        text = completion_text(ids, self.tokenizer)
        cut = min((place for place in map(text.find, stop) if place >= 0), default=len(text))
        forms = [text, text[:cut]]
        if prompt.marks is not None:
            forms += [said for form in forms for said in (form.rpartition(prompt.marks[1])[2], answer_of(form))]
        replies = tuple(read_reply(form, prompt.names) for form in forms)
        said = str(self.tokenizer.decode(ids))
        turn = _Turn(prompt.text, prompt.messages, sequence.ids, prompt.images, said, replies, sequence)
        self._turns.append(turn)
