"""Every model type that is loaded as a causal LM, tiny and random, against its own Hugging Face module.

    python -m tests.families.sweep                       # all types, in minutes; writes docs/models.md
    python -m tests.families.sweep --types llama gemma2  # some, printed

Two promises are checked: a type trains and generates as its module computes, or it is refused in one line.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.engines.partition import full_tensors
from hybrid_rlhf.functional.logprobs import FLOAT32_TOLERANCE
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.generation.architecture.model_description import Split
from hybrid_rlhf.generation.backends.module import ModuleBackend
from hybrid_rlhf.generation.backends.native import NativeBackend
from hybrid_rlhf.models.families import FAMILIES, unread_weights
from hybrid_rlhf.models.families.vision import VISION_FAMILIES, images_refused
from hybrid_rlhf.models.head_check import module_logprobs, probe_tokens, require_own_logits
from hybrid_rlhf.models.lora import add_lora, lora_merged
from hybrid_rlhf.models.packing import packs, shares_prefixes, use_packing
from hybrid_rlhf.models.policy import Policy, Scorer
from hybrid_rlhf.models.pretrained.loading import adapt_config, adapt_model, load_model
from hybrid_rlhf.models.pretrained.saving import save_model
from hybrid_rlhf.models.vision import ImageEncoder
from hybrid_rlhf.runtime.world import solo_world
from tests.generation.references import hugging_face_greedy
from tests.support.model_types import NotBuilt, model_types, tiny_of_type
from tests.support.models import distance_of_shared_rows, rows_that_begin_alike
from tests.support.tiny import tiny_tokenizer
from tests.support.vision import (
    MIXED,
    build_vision,
    chat_ids,
    greedy_of_transformers,
    of_transformers,
    padded_chats,
    pictures_of,
    prompt_images,
    random_lm,
    require_same_gradients,
    row_images,
    text_mask,
)

GREEDY = SamplingParams(max_new_tokens=10, temperature=0.0)
LENGTHS = (9, 4, 17)
"""Prompt tokens: below and above the windows and selections of the tiny models."""
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
YES, NO = "yes", "-"
WORLD = solo_world(torch.device("cpu"))


@dataclass(frozen=True)
class TypeReport:
    """What a model type can be used for; a text that begins with "refused" or "wrong" has the reason."""

    model_type: str
    generation: str
    training: str = NO
    tensor_parallel: str = NO
    lora: str = NO
    reward_model: str = NO
    towers: str = NO
    images: str = NO
    """"yes", or why images of a type that has a tower for them are refused."""
    as_generate: bool = True
    """Whether greedy tokens are those of transformers' generate; else those of the forward over whole sequences."""

    @property
    def is_correct(self) -> bool:
        """Whether nothing is wrong: what works is right, and what does not is refused."""
        return not any(str(value).startswith("wrong") for value in vars(self).values())

    @property
    def is_built(self) -> bool:
        """Whether transformers builds it."""
        return not self.generation.startswith("not built")


def check_type(model_type: str) -> TypeReport:
    """Build a type and check it."""
    try:
        model = tiny_of_type(model_type)
    except NotBuilt as error:
        return TypeReport(model_type, f"not built: {error}")
    except UserError as error:
        return TypeReport(model_type, f"refused: {error}")
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor([prompts()[0]]))
    except Exception as error:  # noqa: BLE001
        return TypeReport(model_type, f"not built: its own forward fails: {_line(error)}")
    try:
        return _check(model_type, model)
    except Exception as error:  # noqa: BLE001 - one type must not end the sweep of all
        place = traceback.extract_tb(error.__traceback__)[-1]
        return TypeReport(model_type, f"wrong: {_line(error)} ({Path(place.filename).name}:{place.lineno})")


def _check(model_type: str, model: PreTrainedModel) -> TypeReport:
    generation, tensor_parallel, as_generate = _generation(copy.deepcopy(model))
    training = _training(model)
    works = training in ("packed", "padded")
    return TypeReport(
        model_type,
        generation,
        training,
        tensor_parallel,
        _lora(copy.deepcopy(model)) if works else NO,
        _reward_model(model_type),
        _saving(model) if works else NO,
        _images(model_type) if works else NO,
        as_generate,
    )


def prompts() -> list[list[int]]:
    """Prompts of different lengths."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 120, (length,), generator=generator).tolist() for length in LENGTHS]


def adapted(model: PreTrainedModel) -> PreTrainedModel:
    """A model as `load_model` prepares it."""
    adapt_config(model.config, "causal_lm")
    adapt_model(model, ModelConfig())
    return model


@torch.no_grad()
def _generation(model: PreTrainedModel) -> tuple[str, str, bool]:
    """How a type generates, whether tensor parallelism splits it, and whether its tokens are those of generate."""
    model.generation_config.forced_eos_token_id = None
    try:
        expected = [hugging_face_greedy(model, prompt, GREEDY.max_new_tokens) for prompt in prompts()]
    except Exception as error:  # noqa: BLE001 - whatever transformers' own generate raises for one of its models
        return f"refused by transformers' generate: {_line(error)}", NO, True
    try:
        engine = GenerationEngine.from_model(adapted(model), stop_token_ids=())
    except UserError as error:
        return f"refused: {error}", NO, True
    found = [samples[0].token_ids for samples in engine.generate(prompts(), GREEDY)]
    backend = engine.backend
    as_generate = found == expected
    if not as_generate and found != [own_greedy(model, prompt) for prompt in prompts()]:
        return "wrong: greedy tokens differ from generate", NO, False
    if isinstance(backend, NativeBackend):
        return "inference weights", _tensor_parallel(backend), as_generate
    assert isinstance(backend, ModuleBackend)
    if model.config.model_type in FAMILIES:
        return "wrong: has a row in the family table, generates through its module", NO, as_generate
    if not backend.module.support.cache:
        return "module, without cache", NO, as_generate
    return ("module" if backend.module.support.padding else "module, prompts of one length"), NO, as_generate


def _tensor_parallel(backend: NativeBackend) -> str:
    try:
        Split.of(backend.decoder.architecture, 0, 2)
    except UserError as error:
        return f"refused: {error}"
    return YES


def own_greedy(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    """Greedy tokens by the forward over whole sequences, which defines a model; the cache of some types, and the
    positions that generate passes to some, compute something else."""
    ids = list(prompt)
    for _ in range(GREEDY.max_new_tokens):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
def _training(model: PreTrainedModel) -> str:
    expected = [module_logprobs(model, prompt) for prompt in prompts()]
    trained = adapted(copy.deepcopy(model))
    try:
        require_own_logits(trained)
    except UserError as error:
        return f"refused: {error}"
    found = _padded(Policy(trained))
    if worst(found, expected) > 1e-4:
        return f"wrong: log-probs differ by {worst(found, expected):.2g}"
    # roundings in float32 differ with the number of rows and with the processor, by more than 1e-5 in some types
    if packs(trained) and _dependence(trained) > 1e-5 and _dependence(_in_float64(trained)) > 1e-5:
        return "wrong: packed rows depend on each other"
    if shares_prefixes(trained) and (distance := _distance_of_shared_rows(trained)) > 1e-12:
        return f"wrong: shared prefixes change log-probs or gradients by {distance:.2g}"
    return "packed" if packs(trained) else "padded"


def batch_of(rows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Token ids and mask of rows, padded on the right."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return ids, torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])


def _padded(policy: Policy) -> list[Tensor]:
    """Log-probs of the prompts as one batch."""
    rows = prompts()
    ids, real = batch_of(rows)
    logprobs = policy(ids, real, real)[0]
    return [logprobs[index, 1 : len(row)] for index, row in enumerate(rows)]


def _in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, in float64; Mamba-2 scans in float32 all the same."""
    model.set_experts_implementation("eager")  # torch's grouped products have no float64
    return model.double()  # type: ignore[no-any-return]


def _dependence(model: PreTrainedModel) -> float:
    """Largest difference of log-probs among others from those of a prompt alone."""
    policy = Policy(model)
    return worst(_padded(policy), [_alone(policy, prompt) for prompt in prompts()])


@torch.enable_grad()
def _distance_of_shared_rows(model: PreTrainedModel) -> float:
    ids, mask = rows_that_begin_alike()
    return distance_of_shared_rows(Policy(_in_float64(copy.deepcopy(model))), ids, mask, mask)


def _alone(policy: Policy, prompt: list[int]) -> Tensor:
    ids, real = batch_of([prompt])
    return policy(ids, real, real)[0][0, 1:]  # type: ignore[no-any-return]


def worst(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest difference."""
    return max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))


def _lora(model: PreTrainedModel) -> str:
    """Whether adapters learn, and merged weights compute as adapters do."""
    model = adapted(model)
    try:
        add_lora(model, LoraConfig(), "causal_lm", seed=0)
    except UserError as error:
        return f"refused: {error}"
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    tokens = probe_tokens(model.config.get_text_config().vocab_size)
    separate = module_logprobs(model, tokens)
    with lora_merged(model):
        merged = module_logprobs(model, tokens)
    if worst([merged], [separate]) > 1e-3:
        return "wrong: merged weights differ from adapters"
    _padded(Policy(model))[0].sum().backward()
    learned = [p.grad for name, p in model.named_parameters() if "lora_B" in name and p.grad is not None]
    return YES if any(bool(grad.abs().max() > 0) for grad in learned) else "wrong: adapters do not learn"


@torch.no_grad()
def _reward_model(model_type: str) -> str:
    # a selection of all keys: among keys with a score of exactly 0, an indexer selects by chance
    every_key = {"index_topk": 64} if hasattr(CONFIG_MAPPING[model_type](), "index_topk") else {}
    try:
        model = tiny_of_type(model_type, AutoModelForSequenceClassification, num_labels=1, **every_key)
    except NotBuilt:
        return NO
    if not hasattr(model, "score"):
        return NO
    scorer = Scorer(adapted(model))
    rows = prompts()
    found = scorer(*batch_of(rows))
    for index, row in enumerate(rows):
        alone = scorer(*batch_of([row]))[0]
        if worst([found[index, : len(row)]], [alone]) > 1e-4:
            return "wrong: scores of padded rows differ"
    return YES


def _saving(model: PreTrainedModel) -> str:
    """Whether a folder is saved as it was loaded, with the towers that text does not read."""
    with tempfile.TemporaryDirectory() as place:
        theirs, ours = Path(place, "theirs"), Path(place, "ours")
        model.save_pretrained(theirs)
        lm, _ = load_model(str(theirs), "causal_lm", config=ModelConfig(), dtype=torch.float32)
        save_model(ours, full_tensors(lm, WORLD), lm=lm, tokenizer=tiny_tokenizer(), world=WORLD)
        loaded, saved = (load_file(folder / "model.safetensors") for folder in (theirs, ours))
        if loaded.keys() != saved.keys():
            return f"wrong: saved under other names, such as {min(loaded.keys() ^ saved.keys())}"
        if changed := [name for name in loaded if not torch.equal(loaded[name], saved[name])]:
            as_theirs = type(model).from_pretrained(theirs).state_dict()
            if all(torch.equal(as_theirs[name], saved[name]) for name in changed):
                return f"transformers loads other values than the file has, such as {changed[0]}"
            return f"wrong: saved with other values, such as {changed[0]}"
    return "kept" if unread_weights(lm, (name for name, _ in lm.named_parameters())) else NO


def _images(model_type: str) -> str:
    """Whether images are read as the type's own module reads them, and saved with the names of its weights."""
    if model_type not in VISION_FAMILIES:
        refusal = images_refused(CONFIG_MAPPING[model_type]()) or ""
        reason = re.search(r"\((.*)\)", refusal)
        return reason[1] if reason and model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES else NO
    lm = build_vision(model_type)
    if (distance := _distance_of_rows_with_images(model_type)) > 1e-5:
        return f"wrong: log-probs of packed rows differ by {distance:.2g}"
    saving = _saving(copy.deepcopy(lm))
    rows = [(chat_ids(model_type, content), pictures_of(content)) for content, _ in MIXED]
    expected = [greedy_of_transformers(model_type, lm, *row, GREEDY.max_new_tokens) for row in rows]
    encoder = ImageEncoder(lm)
    images = [prompt_images(encoder, ids, row_images(model_type, pictures)) for ids, pictures in rows]
    engine = GenerationEngine.from_model(lm, stop_token_ids=(lm.generation_config.eos_token_id,))
    found = [samples[0].token_ids for samples in engine.generate([ids for ids, _ in rows], GREEDY, images=images)]
    if found != expected:
        return "wrong: greedy tokens after images differ from generate"
    return YES if saving == "kept" else saving


def _distance_of_rows_with_images(model_type: str) -> float:
    """Largest difference of log-probs of packed rows from those of forwards of single rows; gradients, also of the
    tower, must agree too."""
    ours, theirs = random_lm(model_type), random_lm(model_type)
    use_packing(ours)
    ids, real, images = padded_chats(model_type, MIXED)
    mask = text_mask(ours, ids, real)[:, 1:]
    found = Policy(ours)(ids, real, text_mask(ours, ids, real), images=images)[0][:, 1:]
    expected = pad_sequence(of_transformers(model_type, theirs, MIXED), batch_first=True)
    weights = torch.linspace(-1, 1, int(mask.sum()))
    for logprobs in (found, expected):
        (logprobs[mask] * weights).sum().backward()
    require_same_gradients(ours, theirs)
    return worst([found[mask].detach()], [expected[mask].detach()])


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def page(reports: Sequence[TypeReport]) -> str:
    """docs/models.md."""
    built = [report for report in reports if report.is_built]
    counts = lambda start: sum(r.generation.startswith(start) for r in built)  # noqa: E731
    towers = [report for report in built if report.towers == "kept"]
    trained = [report for report in built if report.training in ("packed", "padded")]
    rows = "\n".join(
        f"| `{r.model_type}` | {_cell(r.generation)} | {_cell(r.training)} | {_cell(r.tensor_parallel)} | "
        f"{_cell(r.lora)} | {_cell(r.reward_model)} | {_cell(r.towers)} | {_cell(r.images)} |"
        for r in built
    )
    rest = "\n".join(
        f"- `{r.model_type}`: {r.generation.removeprefix('not built: ')}" for r in reports if not r.is_built
    )
    others = ", ".join(f"`{report.model_type}`" for report in built if not report.as_generate)
    return PAGE_TEXT.format(
        version=transformers.__version__,
        float32=f"{FLOAT32_TOLERANCE:g}",
        types=len(reports),
        built=len(built),
        native=counts("inference weights"),
        module=counts("module"),
        packed=sum(report.training == "packed" for report in trained),
        padded=sum(report.training == "padded" for report in trained),
        towers=len(towers),
        images=sum(report.images == YES for report in built),
        as_forward=textwrap.fill(others or "none", width=120, break_on_hyphens=False),
        rows=rows,
        rest=rest,
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


PAGE_TEXT = """# Models

Written by `make families`, which builds every model type of the causal-LM mapping of transformers {version}, and
others with towers for images or sound, tiny and random, from its own config: {types} types, of which {built} are built.
A type generates and trains as its Hugging Face module computes, or it is refused with the line in the table. In
float32, log-probs agree to 1e-4, packed rows are independent to 1e-5, and greedy tokens equal those of `generate`, or,
where the cache or the positions of `generate` compute something else, those of the forward over whole sequences:
{as_forward}.

When a model is loaded, its log-probs are compared with its logits for a row and its padded beginning, and a module that
generates with its own forward over whole sequences, to {float32} nats in float32, and to more in half precision.

- **Generation**: *inference weights* are the library's own decoder ({native} types): continuous batching, CUDA graphs,
  tensor parallelism. *module* is the Hugging Face module ({module} types): rows are padded; where padding changes the
  result, prompts of one length decode together; without a usable cache each step computes the whole sequence.
- **Training**: *packed* rows have no padding ({packed} types), except in recurrent layers and Llama 4's attention, and
  without these layers their common beginnings are computed once, as in separate rows to 1e-12 in float64;
  others are padded ({padded} types).
- **Reward model**: the type has a sequence classifier with a score per token; critics are reward models too.
- **Towers**: *kept* where the model reads images or sound ({towers} types). The weights of towers and projectors have
  no gradient, no optimizer state and no adapters, unless `model.vision` is `train`, and are saved with the names,
  values and settings that were loaded, beside unchanged files of the processor. Other types with towers are refused.
- **Images**: *yes* where rows may have images ({images} types). Greedy tokens after images equal those of `generate`,
  log-probs and gradients of packed rows with images those of the module, row by row. Other types with towers train and
  generate on text alone; the table has the reason.

| Type | Generation | Training | Tensor parallel | LoRA | Reward model | Towers | Images |
|---|---|---|---|---|---|---|---|
{rows}

Types of which no tiny model is built:

{rest}
"""


def main() -> None:
    """Check types, each group in a process of its own; write the page if all types were checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="*", help="model types; default: all, and write docs/models.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    reports = []
    for model_type in options.types or model_types():
        report = check_type(model_type)
        reports.append(report)
        print(" | ".join(str(value) for value in vars(report).values()), flush=True)
    if not options.types:
        PAGE.write_text(page(reports))
        print(f"written: {PAGE}")
    sys.exit(0 if all(report.is_correct for report in reports) else 1)


if __name__ == "__main__":
    main()
