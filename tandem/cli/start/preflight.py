"""Checks that `tandem up` makes before it starts anything: listeners, device, memory. Each error names its option."""

import contextlib
import os
from typing import TYPE_CHECKING

import psutil
from rich.console import Console
from rich.markup import escape

from tandem.cli.diagnosis.checks import host_problem, port_problem
from tandem.engine.config import EngineConfig
from tandem.net.address import address_of, is_loopback
from tandem.net.security.credentials import check_guarded
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.messages import Role
from tandem.protocol.speculation_method import SpeculationMethod
from tandem.settings.cluster import ClusterSettings
from tandem.settings.engine import GIB, GPU_PAGE_TOKENS

if TYPE_CHECKING:
    from tandem.engine.config.model import ModelSpec

LOOPBACK = "127.0.0.1"
_SIZES_SHOWN = 16
"""The largest tensor parallel size that a refusal names."""


def check_listeners(config: ClusterSettings) -> None:
    """Check the listeners' addresses and ports. Raises InvalidArgument, which names the option, for an unusable one.

    An address is unusable if it does not belong to this machine, or if other machines could use it without a key
    although --insecure is not given. A port is unusable if it cannot be opened.
    """
    router = config.router
    if (problem := host_problem(router.host)) is not None:
        raise InvalidArgument(
            "--host",
            f"cannot listen on {router.host!r} ({problem}); give an address of this machine, 127.0.0.1 for instance",
        )
    check_guarded("--host", router.host, guarded=router.guarded, insecure=router.insecure)
    for option, host, port in (
        ("--grpc-port", router.host, router.grpc_port),
        ("--http-port", router.host, router.http_port),
        ("--operations-port", router.host, router.operations_port),
        # In a joined Ray cluster the controller's address is not known yet.
        ("--metrics-port", LOOPBACK, 0 if config.ray_address else config.metrics_port),
        ("--controller-port", LOOPBACK, 0 if config.ray_address else config.controller_port),
    ):
        problem = port_problem(host, port)
        if problem is not None:
            raise InvalidArgument(
                option,
                f"cannot listen on {address_of(host, port)} ({problem}); choose another port, or 0 for any free one",
            )


def check_network(config: ClusterSettings) -> None:
    """Raise InvalidArgument if the environment would make UCX listen on an untrusted network.

    Workers on this host inherit the UCX variables in the environment of `tandem up`.
    """
    from kv_transfer.nixl_backend.ucx_shared_memory import check_transports

    if not config.ray_address:
        check_transports(os.environ, trusted_network=config.worker.trusted_network)


def check_device(config: ClusterSettings) -> None:
    """Raise InvalidArgument if the workers' GPU or its kernels are missing. Ray checks other hosts."""
    if config.engine.on_cpu or config.ray_address:
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise InvalidArgument("--device", f"{config.engine.device} requested, PyTorch sees no GPU; use --device cpu")
    ranks = max(config.ranks_of(role) for role in config.worker_counts())
    if ranks > count:
        raise InvalidArgument(
            _ranks_option(config),
            f"{ranks} GPUs requested, PyTorch sees {count}; use a smaller number",
        )
    first = int(config.engine.device.partition(":")[2] or 0)
    if first + ranks > count:
        raise InvalidArgument(
            "--device", f"cuda:{first + ranks - 1} requested, PyTorch sees cuda:0 to cuda:{count - 1} alone"
        )
    from tandem.engine.device import why_no_gpu_kernels

    if (missing := why_no_gpu_kernels()) is not None:
        raise InvalidArgument("--device", f"{config.engine.device} requested, {missing}")


def check_memory(config: ClusterSettings) -> None:
    """Raise InvalidArgument if the workers' KV pages exceed the host's memory.

    A worker on a GPU or on another host checks the memory itself.
    """
    if not config.engine.on_cpu or config.engine.kv_pool_bytes is None or config.ray_address:
        return
    ranks = sum(count * config.ranks_of(role) for role, count in config.worker_counts().items())
    pool_gib, free = config.engine.kv_pool_bytes / GIB, psutil.virtual_memory().available / GIB
    if ranks * pool_gib > free:
        raise InvalidArgument(
            "--kv-cache-gib",
            f"{_workers_of(config)} with {pool_gib:g} GiB each do not fit into the {free:.2f} GiB of memory that are"
            f" free; choose less than {free / ranks:.2f}",
        )


def check_tiers(config: ClusterSettings) -> None:
    """Raise InvalidArgument if workers cannot have tiers of the prefix cache, or if the host has too little room.

    Workers on another host check the room themselves.
    """
    worker, counts = config.worker, config.worker_counts()
    if not worker.kv_host_bytes and not worker.kv_disk_bytes:
        return
    option = "--kv-host-gib" if worker.kv_host_bytes else "--kv-disk-gib"
    if not worker.prefix_cache:
        raise InvalidArgument(option, "needs the prefix cache; leave --no-prefix-cache out")
    if any(config.ranks_of(role) > 1 for role in counts):
        raise InvalidArgument(option, "is for workers of one GPU; leave it out, or do not divide the model")
    if config.ray_address:
        return
    # Imported here, because the import of PyTorch takes seconds.
    from tandem.engine.cache.tiers.disk import disk_bytes

    workers = sum(count for role, count in counts.items() if role.prefills)
    _check_room("--kv-host-gib", workers, worker.kv_host_bytes, psutil.virtual_memory().available, "free host memory")
    if worker.kv_disk_path is not None:
        _check_room("--kv-disk-gib", workers, worker.kv_disk_bytes, disk_bytes(worker.kv_disk_path), "the disk")


def _check_room(option: str, workers: int, size: int, room: int, place: str) -> None:
    if workers * size > room:
        raise InvalidArgument(
            option,
            f"{workers} workers with {size / GIB:g} GiB each exceed the {room / GIB:.2f} GiB of {place}; choose less"
            f" than {room / GIB / workers:.2f}",
        )


def check_page(config: ClusterSettings) -> None:
    """Raise InvalidArgument unless a worker's KV cache holds at least one page of the model.

    The model's folder must have been checked before.
    """
    import torch

    from tandem.engine.cache.paged_cache import cache_bytes
    from tandem.engine.config.sharding import rank_spec
    from tandem.engine.device import parse_dtype, parse_kv_dtype, parse_pages
    from tandem.engine.models.load_spec import bounded, load_spec
    from tandem.engine.speculation.load_draft import split_kv

    if config.engine.kv_pool_bytes is None or (config.ray_address and not config.engine.on_cpu):
        return
    engine = _engine(config)
    device = torch.device(config.engine.device)
    whole = bounded(load_spec(config.served.model), config.engine.max_model_len)
    whole, page_tokens = parse_pages(engine, device, whole)
    # The fewer ranks, the larger the page of each.
    shape = rank_spec(whole, min(config.tensor_ranks_of(role) for role in config.worker_counts()))
    dtypes = parse_kv_dtype(engine, device, shape), parse_dtype(engine, device, shape)
    needed = cache_bytes(shape, 1, page_tokens, *dtypes)
    pages = split_kv(engine, shape, page_tokens, device, config.engine.kv_pool_bytes, whole=whole).target or 0
    if pages < needed:
        beside = "" if pages == config.engine.kv_pool_bytes else ", without the part of the drafts,"
        raise InvalidArgument(
            "--kv-cache-gib",
            f"{pages / GIB:.4g} GiB{beside} hold no page of {page_tokens} tokens, which takes "
            f"{needed / GIB:.3g} GiB; choose more, or smaller --page-tokens",
        )


def check_loras(config: ClusterSettings) -> None:
    """Check the adapters' folders against the model.

    Raises InvalidArgument or ModelError, which names the wrong adapter.
    """
    if not config.engine.loras:
        return
    from tandem.engine.adapters.load import check_adapters
    from tandem.engine.models.load_spec import load_spec

    names = config.served.names
    if taken := [name for name, _ in config.engine.loras if name in names]:
        raise InvalidArgument("--lora", f"{taken[0]!r} is the model's own name; give the adapter another one")
    check_adapters(_engine(config), load_spec(config.served.model))


def check_draft(config: ClusterSettings) -> None:
    """Check the folder of --draft, or the MTP layer of the checkpoint, against the model.

    Raises ModelError, which says what cannot be served.
    """
    engine = _engine(config)
    if engine.draft is None and not engine.mtp:
        return
    from tandem.engine.models.load_spec import load_spec
    from tandem.engine.speculation.draft_folder import check_draft_folder, read_head
    from tandem.engine.speculation.eagle.mtp import MtpLayer

    spec = load_spec(config.served.model)
    if engine.draft is not None:
        check_draft_folder(engine.draft, spec, config.served.tokenizer_folder)
    elif isinstance(layer := read_head(engine, spec), MtpLayer):
        layer.check()


def check_weights(config: ClusterSettings) -> None:
    """Raise InvalidArgument if the workers' weights, including those for drafts, and KV pages exceed the host's memory.

    The model's folder must have been checked before. A worker on a GPU or on another host checks the
    memory itself.
    """
    import torch

    from tandem.engine.adapters.load import slot_bytes
    from tandem.engine.config.sharding import Rank
    from tandem.engine.device import parse_dtype
    from tandem.engine.models.load_spec import bounded, load_spec, quantized_at_load
    from tandem.engine.models.rank_parameters import rank_bytes
    from tandem.engine.speculation.draft_folder import draft_bytes, reads_output_layer

    # Computed even if the weights are on a GPU or another host: this call rejects a checkpoint that is already
    # quantized.
    stored = bounded(load_spec(config.served.model), config.engine.max_model_len)
    shapes = {role: quantized_at_load(stored, config.quantization_of(role)) for role in Role}
    counts = config.worker_counts()
    divided = {role: _divided(config, role, stored) for role in counts}
    if not config.engine.on_cpu or config.ray_address:
        return
    engine, device = _engine(config), torch.device("cpu")
    dtype = parse_dtype(engine, device, stored)
    drafts, whole_output = draft_bytes(engine, stored, dtype, device), reads_output_layer(engine, stored)
    sizes = {}
    for role in counts:
        ranks = [
            Rank.of(number, config.tensor_ranks_of(role), config.stages_of(role))
            for number in range(config.tensor_ranks_of(role) * config.stages_of(role))
        ] * config.context_ranks_of(role)
        weights = [rank_bytes(shapes[role], rank, dtype, on_cpu=True, whole_output=whole_output) for rank in ranks]
        sizes[role] = sum(weights) + len(ranks) * slot_bytes(engine, divided[role], dtype) + drafts
    weights_gib, pages = max(sizes.values()) / GIB, config.engine.kv_pool_bytes or 0
    free = psutil.virtual_memory().available
    # Each rank has KV pages of its own.
    if sum(counts[role] * (size + config.ranks_of(role) * pages) for role, size in sizes.items()) > free:
        raise InvalidArgument(
            "--device",
            f"{_workers_of(config)} with {weights_gib:.2f} GiB of weights a worker and {pages / GIB:.3g} GiB of KV"
            f" cache each do not fit into the {free / GIB:.2f} GiB of memory that are free; use --device cuda, another"
            " --dtype, less --kv-cache-gib or a smaller model",
        )


def _ranks_option(config: ClusterSettings) -> str:
    """Return the option that decides how many ranks the workers with the most ranks have."""
    return config.prefill_only_option or "--tensor-parallel-size"


def _workers_of(config: ClusterSettings) -> str:
    """Return the number of workers in words, and that of their ranks if they have several."""
    ranks = sum(count * config.ranks_of(role) for role, count in config.worker_counts().items())
    workers = f"{config.worker_count} workers"
    return workers if ranks == config.worker_count else f"{workers} of {ranks} ranks together"


def _divided(config: ClusterSettings, role: Role, stored: "ModelSpec") -> "ModelSpec":
    """Return the spec of the first rank of a role's workers.

    Raises InvalidArgument for a model that cannot be divided; it names the option and the sizes that divide the model.
    """
    from tandem.engine.config.sharding import Rank, own_spec, rank_spec

    try:
        return own_spec(stored, Rank.of(0, config.tensor_ranks_of(role), config.stages_of(role)))
    except InvalidArgument as error:
        if error.field != "tensor_parallel_size":
            raise
        fitting = []
        for ranks in range(1, _SIZES_SHOWN + 1):
            with contextlib.suppress(InvalidArgument):
                rank_spec(stored, ranks)
                fitting.append(str(ranks))
        own = getattr(config, f"{role.value}_tensor_parallel_size", None)
        option = "--tensor-parallel-size" if own is None else f"--{role.value}-tensor-parallel-size"
        reason = error.problem.partition(";")[0]
        raise InvalidArgument(option, f"{reason}; sizes that divide it are {', '.join(fitting)}") from error


def _engine(config: ClusterSettings) -> EngineConfig:
    """Return an engine configuration for computing the sizes of weights and pages; it does not serve."""
    mtp = config.worker.speculate is SpeculationMethod.MTP
    return EngineConfig(config.served, mtp=mtp, **config.engine.values())


def warn_if_open(config: ClusterSettings) -> None:
    """Print a warning if clients on other machines could use the cluster without a key."""
    host = config.router.host
    if not config.router.guarded and not is_loopback(host):
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"[bold red]warning: --host {escape(host)} lets everyone who reaches this machine use the cluster; "
            "set --api-key (or TANDEM_API_KEY) so that clients must present a key[/]"
        )


def warn_of_slow_pages(config: ClusterSettings) -> None:
    """Print a warning if the page size makes prefill slower on GPUs."""
    if config.engine.on_cpu or config.engine.page_tokens is None or config.engine.dtype == "float32":
        return
    if config.engine.page_tokens != GPU_PAGE_TOKENS:
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"[bold]warning: --page-tokens {config.engine.page_tokens} slows prompts down on GPUs; "
            f"{GPU_PAGE_TOKENS} is the fast size[/]"
        )
