"""`tandem up`: starts a cluster, answers a first prompt and serves until Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cli.connection.options import TEMPERATURE_HELP, checked_prompt
from tandem.cli.help_text import further_option
from tandem.cli.option_groups import option_groups
from tandem.cli.plain_errors import plain_errors
from tandem.cli.start.setting_options import settings_of, with_settings
from tandem.cli.start.settings_command import read_config_file
from tandem.settings.setting import AUTO

if TYPE_CHECKING:
    from tandem.cli.connection.router import Sampling
    from tandem.cli.start.serving import FirstPrompt

prompt_option = further_option("First prompt")


@dataclass(frozen=True, slots=True)
class FirstPromptOptions:
    """The options of a prompt that is answered right after the start."""

    prompt: Annotated[str | None, prompt_option("--prompt", help="Answer this first and show its timeline.")] = None
    max_tokens: Annotated[int, prompt_option("--max-tokens", help="Maximum tokens of that answer.")] = 160
    temperature: Annotated[float, prompt_option("--temperature", help=TEMPERATURE_HELP)] = 0.0
    once: Annotated[bool, prompt_option("--once", help="End after that answer.")] = False

    @property
    def sampling(self) -> Sampling:
        """The sampling parameters. Raises InvalidArgument, which names the option and its limits."""
        from tandem.cli.connection.router import Sampling

        return Sampling(self.max_tokens, self.temperature)

    def first(self, sampling: Sampling) -> FirstPrompt | None:
        """Return the first prompt, if there is one. Raises InvalidArgument for --once without a prompt."""
        from tandem.cli.start.serving import FirstPrompt
        from tandem.protocol.errors import InvalidArgument

        if self.prompt is not None:
            return FirstPrompt(checked_prompt("--prompt", self.prompt), sampling)
        if self.once:
            raise InvalidArgument("--once", "needs a --prompt to answer")
        return None


def check_platform() -> None:
    """Raise FailedPrecondition on a system on which no worker can run."""
    from tandem.protocol.errors import FailedPrecondition

    if sys.platform != "linux":
        raise FailedPrecondition(
            "a cluster runs on Linux only, as NIXL does; from here, use one elsewhere with --address (docs/install.md)"
        )


def check_model(given: Mapping[str, Any]) -> None:
    """Raise InvalidArgument for an empty model name, or for two models."""
    from tandem.protocol.errors import InvalidArgument

    if given["model"] is not None and given["random_weights"] is not None:
        raise InvalidArgument("--random-weights", "takes the place of --model; give one of them")
    if given["model"] == "":
        raise InvalidArgument("--model", "is empty; give a Hugging Face folder, a GGUF file or a Hub id")


def model_path(given: Mapping[str, Any]) -> Path | None:
    """Return the model's folder or file, creating it for random weights; None = the default model."""
    if given["random_weights"] is not None:
        from tandem.cli.models.random_model import random_model

        return random_model(given["random_weights"])
    return None if given["model"] is None else Path(given["model"])


def check_workers(mode: str, *, prefill: int | None, decode: int | None, workers: int | None) -> None:
    """Raise InvalidArgument if an option for a number of workers is given that does not belong to the mode.

    None = the option is not given.
    """
    from tandem.protocol.errors import InvalidArgument
    from tandem.protocol.mode import Mode

    if mode == AUTO and workers is not None and (prefill is not None or decode is not None):
        raise InvalidArgument("--workers", "is for workers that do both; give it, or --prefill and --decode")
    for option, count, modes in (
        ("--prefill", prefill, (Mode.DISAGGREGATED,)),
        ("--decode", decode, (Mode.DISAGGREGATED,)),
        ("--workers", workers, (Mode.COLOCATED, Mode.ADAPTIVE)),
    ):
        if count is not None and mode in set(Mode) and mode not in modes:
            raise InvalidArgument(option, f"is for --mode {' or '.join(modes)}")


def choose_hardware(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options' values with `auto` for device and mode replaced; on GPUs, also choose the number of workers.

    The device is `cuda` if this host has a usable GPU, otherwise `cpu`. On GPUs, every worker has its own GPU and runs
    both prefill and decode, in adaptive mode with two or more; on a CPU, one worker prefills and one decodes. With
    `--tensor-parallel-size N`, every worker has N GPUs; on a CPU, one worker then does both with N processes.
    `--prefill`, `--decode` and `--workers` override these choices. With `--address`, workers run on the nodes of
    another Ray cluster, whose GPUs are unknown here, so the number of workers must be given.
    """
    from tandem.engine.device import usable_gpus

    device, mode, workers, joined = given["device"], given["mode"], given["workers"], bool(given["address"])
    ranks = given["tensor_parallel_size"] or 1
    gpus = usable_gpus() if device in {AUTO, "cuda"} else 0
    if device == AUTO:
        device = "cuda" if gpus else "cpu"
    if mode == AUTO:
        by_role = ("prefill", "decode", "prefill_tensor_parallel_size", "decode_tensor_parallel_size")
        prefill_ranks = given["prefill_pipeline_size"] * given["prefill_context_parallel_size"]
        separate = any(given[name] is not None for name in by_role) or prefill_ranks > 1
        shared = workers is not None or (device != "cpu" and not joined) or ranks > 1
        mode = "disaggregated" if separate or not shared else "adaptive"
    if workers is None and device == "cuda" and not joined:
        workers = max(1, gpus // ranks)
    return {**given, "device": device, "mode": mode, "workers": workers}


@plain_errors
@with_settings
@option_groups
def up(
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            is_eager=True,
            callback=read_config_file,
            help="YAML file with options, `http-port: 8080` a line; the command line and variables TANDEM_HTTP_PORT, …"
            " come first.",
        ),
    ] = None,
    answer: FirstPromptOptions,
    given: Mapping[str, Any],
) -> None:
    """Start a cluster and serve until Ctrl-C."""
    from tandem.cli.start.serving import serve

    check_platform()
    check_model(given)
    workers = {name: given[name] for name in ("prefill", "decode", "workers")}
    check_workers(given["mode"], **workers)
    sampling = answer.sampling
    settings = settings_of(choose_hardware(given))
    serve(settings, model_path(given), answer.first(sampling), once=answer.once)
