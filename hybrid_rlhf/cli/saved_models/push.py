"""`hybrid-rlhf push MODEL USER/NAME`: upload a saved model to the Hugging Face hub.

Only the model's files are uploaded: a run folder also has checkpoints, metrics and settings with local paths.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import PushConfig
from hybrid_rlhf.runtime.command_line import command
from hybrid_rlhf.runtime.files.reading import user_path
from hybrid_rlhf.runtime.output import print_result

MODEL_FILES = (
    "README.md",
    "LICENSE*",
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "*.gguf",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*processor_config.json",
    "spiece.model",
    "chat_template*",
    "additional_chat_templates/*",
    "adapter_config.json",
)
"""Patterns of a model's files."""


@command(PushConfig, positional=("path", "repo"))
def main(config: PushConfig) -> None:
    """Check the folder and upload it."""
    _push(config, _model_files(config.path))


def _push(config: PushConfig, files: list[str]) -> None:
    from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise UserError("push needs the hub, HF_HUB_OFFLINE is set: unset it")
    if get_token() is None:
        raise UserError("push needs a token of the hub, got none: log in with `hf auth login`, or export HF_TOKEN=...")
    api = HfApi()
    folder = user_path(config.path)
    with _hub_errors(config.repo):
        api.create_repo(config.repo, private=config.private, exist_ok=True)
        commit = api.create_commit(
            config.repo,
            [CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(folder / name)) for name in files],
            commit_message=config.message,
        )
    url = str(commit.commit_url)
    print_result({"repo": config.repo, "files": files, "commit": url}, f"{len(files)} files pushed: {url}")


def _model_files(path: str) -> list[str]:
    """The model's files in a folder, by their names in the repository.

    Raises:
        UserError: when there is no model.
    """
    folder = user_path(path)
    files = sorted({file for pattern in MODEL_FILES for file in folder.glob(pattern) if file.is_file()})
    if not any(file.suffix in (".safetensors", ".gguf") for file in files):
        raise UserError(f"a model folder must have weights, {path} has none: give a folder that a step or export wrote")
    return [file.relative_to(folder).as_posix() for file in files]


@contextlib.contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Context that turns errors of the hub and of the network into one line."""
    from httpx2 import HTTPError
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        fix = {
            401: "log in again with `hf auth login`",
            403: "use a token that may write to it",
            404: "check its name",
            409: "choose another name",
            429: "wait, then push again",
        }.get(status, "push again")
        reason = error.server_message or str(error).partition("\n")[0]
        raise UserError(f"the hub refuses {repo} with status {status} ({reason}): {fix}") from error
    except (HTTPError, OSError, ValueError) as error:
        raise UserError(
            f"the hub cannot be reached for {repo} ({str(error) or type(error).__name__}): push again"
        ) from error
