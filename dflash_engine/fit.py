"""Whether a target, its draft and a context fit into this machine's memory, asked before loading.

The system does not refuse a model that does not fit: it swaps, and every token waits for the disk.
"""

import functools
from bisect import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from . import hub, registry
from .errors import NotEnoughMemoryError, UnsupportedDraftError, UnsupportedTargetError
from .footprint import CACHE_STEP, PREFILL_STEP, Footprint, read_block, read_model

Precision = Literal["auto", "float32", "native"]
Resolved = Literal["float32", "native"]

GIB = 2**30
RUNTIME = 256 * 2**20  # bytes: MLX itself, its kernels, freed buffers it keeps
LEAST_CONTEXT = 2048  # tokens: a question with its passages and an answer
ROUND_CONTEXTS = tuple(1024 * 2**power for power in range(9, 0, -1))  # 512k down to 2k


@dataclass(frozen=True)
class Machine:
    """What a machine has, in bytes: ``total`` memory; of it ``limit`` for models, ``used`` already.

    On Metal the limit is what the system lets the GPU keep resident, about two thirds of a small
    Mac's memory; elsewhere it is what is available now.
    """

    total: int
    limit: int
    used: int = 0
    gpu: bool = False

    @property
    def usable(self) -> int:
        """Left for a model that is loaded now."""
        return max(self.limit - self.used, 0)

    @classmethod
    def here(cls) -> "Machine":
        """This machine, at this moment."""
        import mlx.core as mx

        memory = psutil.virtual_memory()
        info = _device_info(mx)
        gpu = bool(mx.default_device() == mx.gpu)
        if gpu and "max_recommended_working_set_size" in info:
            limit = int(info["max_recommended_working_set_size"])
            return cls(int(info["memory_size"]), limit, mx.get_active_memory(), gpu=True)
        return cls(memory.total, memory.available, gpu=gpu)


def _device_info(mx: Any) -> dict[str, Any]:
    if hasattr(mx, "device_info"):
        return dict(mx.device_info())
    return dict(mx.metal.device_info()) if mx.metal.is_available() else {}


@dataclass(frozen=True)
class Need:
    """Bytes that an engine takes: ``target`` and ``draft`` weights, the ``cache`` of ``context``
    tokens, the draft's own (``draft_cache``), and what a forward holds meanwhile (``working``).
    """

    context: int
    target: int
    draft: int
    cache: int
    draft_cache: int
    working: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.target + self.draft + self.cache + self.draft_cache + self.working

    def __str__(self) -> str:
        parts = [f"target {size(self.target)}"]
        if self.draft:
            parts.append(f"draft {size(self.draft + self.draft_cache)}")
        parts.append(f"a context of {self.context} tokens {size(self.cache)}")
        parts.append(f"working {size(self.working)}")
        return ", ".join(parts)


def need(
    target: Footprint, draft: Footprint | None, context: int, *, kv_bits: int | None, gpu: bool
) -> Need:
    """What a target and its draft take together for ``context`` tokens."""
    draft_cache, working = 0, target.working(context, fused=gpu)
    if draft:
        features = PREFILL_STEP * draft.taps * draft.hidden * target.value_bytes
        draft_cache = draft.cache.bytes(context, draft.value_bytes) + features
        working = max(working, draft.working(context, fused=gpu))
    return Need(
        context=context,
        target=target.weights,
        draft=draft.weights if draft else 0,
        cache=target.cache.bytes(context, target.value_bytes, kv_bits),
        draft_cache=draft_cache,
        working=RUNTIME + working,
    )


def of_pair(pair: registry.Pair, bits: float, context: int = 8192) -> Need:
    """What a registered pair takes with its target in ``bits`` (32: all in fp32), on Metal."""
    draft = pair.draft.footprint(32 if bits == 32 else 16)
    return need(pair.target.footprint(bits), draft, context, kv_bits=None, gpu=True)


def resolve_precision(
    target_folder: Path, precision: Precision, machine: Machine | None = None
) -> Resolved:
    """What ``auto`` means for this target here.

    On a GPU weights stay as stored. On CPU, where 4-bit kernels take as long for a prompt as ten
    fp32 ones, they become fp32 if a third of the memory holds them.
    """
    if precision != "auto":
        return precision
    machine = machine or Machine.here()
    if machine.gpu:
        return "native"
    dense = _read_target(target_folder, "float32").weights
    return "float32" if dense < machine.total / 3 else "native"


@dataclass(frozen=True)
class _Plan:
    """The settings that change what is needed."""

    context: int
    precision: Resolved
    kv_bits: int | None
    draft_bits: int | None
    draft: bool


_SAID = {
    "kv_bits": "kv_bits={}",
    "draft_bits": "draft_bits={}",
    "context": "context={}",
    "precision": "precision={!r}",
    "draft": "no draft model",
}


def check(
    target_folder: Path,
    draft_folder: Path | None = None,
    *,
    context: int | None = None,
    precision: Precision = "auto",
    kv_bits: int | None = None,
    draft_bits: int | None = None,
    machine: Machine | None = None,
) -> Need:
    """What is needed for a ``context`` in tokens; without one, for the longest that fits.

    ``Need.context`` says which: never more than the target was made for. Raises
    NotEnoughMemoryError, which names the settings with which it would fit, and
    UnsupportedTargetError or UnsupportedDraftError for a folder that cannot be read.
    """
    machine = machine or Machine.here()
    case = _Case(target_folder, draft_folder, machine)
    resolved = resolve_precision(target_folder, precision, machine)
    longest = case.target(resolved).context
    asked = min(context or longest, longest)
    plan = _Plan(asked, resolved, kv_bits, draft_bits, draft_folder is not None)
    if context is None and not case.fits(plan):
        plan = case.with_longest_context(plan)
    if not case.fits(plan):
        raise NotEnoughMemoryError(case.refusal(plan))
    return case.need(plan)


class _Case:
    """A target and a draft on a machine, under one plan or another."""

    def __init__(self, target: Path, draft: Path | None, machine: Machine) -> None:
        self.name = hub.folder_name(target)
        self.machine = machine
        # Headers are read once for each form that the weights can have.
        self.target = functools.cache(functools.partial(_read_target, target))
        self.draft = functools.cache(functools.partial(_read_draft, draft, machine))

    def need(self, plan: _Plan) -> Need:
        target = self.target(plan.precision)
        draft = self.draft(plan.precision, plan.draft_bits) if plan.draft else None
        return need(target, draft, plan.context, kv_bits=plan.kv_bits, gpu=self.machine.gpu)

    def fits(self, plan: _Plan) -> bool:
        return self.need(plan).total <= self.machine.usable

    def with_longest_context(self, plan: _Plan) -> _Plan:
        """The plan with the longest context that fits, but no less than is of use."""
        least = min(LEAST_CONTEXT, plan.context)
        contexts = range(least, plan.context + 1, CACHE_STEP)
        fit = bisect(contexts, False, key=lambda n: not self.fits(replace(plan, context=n)))
        return replace(plan, context=contexts[max(fit - 1, 0)])

    def refusal(self, plan: _Plan) -> str:
        """What does not fit, and what would."""
        wanted, machine = self.need(plan), self.machine
        said = (
            f"{self.name} needs {size(wanted.total)} of memory ({wanted}); this machine has "
            f"{size(machine.usable)} for it, of {size(machine.total)} in all. "
        )
        if remedy := self._remedy(plan):
            settings = " and ".join(_SAID[name].format(value) for name, value in remedy.items())
            return f"{said}It would fit with {settings}"
        smaller = _largest(registry.PAIRS, min(machine.usable, wanted.total - 1), bits=4)
        if smaller:
            return f"{said}No setting makes it fit; {smaller.target.repo} in 4 bits would"
        return f"{said}No setting makes it fit: close other programs, or take a smaller model"

    def _remedy(self, plan: _Plan) -> dict[str, Any] | None:
        wanted = self.need(plan).total
        changes = [
            change
            for change in self._changes(plan)
            if self.need(replace(plan, **change)).total < wanted
        ]
        for change in changes:
            if self.fits(replace(plan, **change)):
                return change
        together: dict[str, Any] = {}
        for change in changes:
            together |= change
            if self.fits(replace(plan, **together)):
                if "context" in together:  # the rest may leave room for more
                    together |= self._shorter(replace(plan, **together | {"context": plan.context}))
                return together
        return None

    def _changes(self, plan: _Plan) -> Iterator[dict[str, Any]]:
        """Changes of one setting each, those that cost least first."""
        cache = self.target(plan.precision).cache
        bits = plan.kv_bits or 16 if cache.growing and cache.group else 0
        if bits > 8:
            yield {"kv_bits": 8}
        if plan.draft and plan.draft_bits != 4:
            yield {"draft_bits": 4}
        if bits > 4:
            yield {"kv_bits": 4}
        if plan.context > LEAST_CONTEXT:
            yield self._shorter(plan)
        if plan.precision == "float32":
            yield {"precision": "native"}
        if plan.draft:
            yield {"draft": False}

    def _shorter(self, plan: _Plan) -> dict[str, Any]:
        shorter = [context for context in ROUND_CONTEXTS if context < plan.context]
        fit = (context for context in shorter if self.fits(replace(plan, context=context)))
        return {"context": next(fit, shorter[-1])}


def _read_target(folder: Path, precision: Resolved) -> Footprint:
    try:
        return read_model(folder, precision)
    except _UNREADABLE as error:
        raise UnsupportedTargetError(f"the model in {folder} cannot be loaded: {error}") from error


def _read_draft(
    folder: Path | None, machine: Machine, precision: Resolved, bits: int | None
) -> Footprint | None:
    if folder is None:
        return None
    from .drafters.kind import kind_of  # imports mlx

    if kind_of(folder) == "block":
        return read_block(folder, precision, bits)
    try:
        # A model that can write alone is loaded like a target.
        return read_model(folder, resolve_precision(folder, "auto", machine))
    except _UNREADABLE as error:
        raise UnsupportedDraftError(f"no draft in {folder}: {error}") from error


_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError)


def choose(machine: Machine) -> registry.Pair | None:
    """The pair to recommend, with its target in 4 bits: the largest general one that takes half of
    the memory for models, which leaves room for embeddings and longer contexts; on a machine too
    small for that the smallest, if it fits. None without a GPU, where all are slow.
    """
    general = [pair for pair in registry.PAIRS if pair.general]
    smallest = min(general, key=lambda pair: pair.target.parameters)
    if not machine.gpu:
        return None
    return _largest(general, machine.limit // 2, 4) or _largest([smallest], machine.limit, 4)


def _largest(pairs: Iterable[registry.Pair], room: int, bits: float) -> registry.Pair | None:
    fit = [pair for pair in pairs if pair.confirmed and of_pair(pair, bits).total <= room]
    return max(fit, key=lambda pair: pair.target.parameters, default=None)


def wire(machine: Machine, need: Need) -> int | None:
    """Let Metal keep this engine's memory resident, so that the system does not swap it out.

    Returns the limit that was set before, in bytes; None where there is nothing to set.
    """
    import mlx.core as mx

    if not machine.gpu or not mx.metal.is_available():
        return None
    return int(mx.set_wired_limit(min(machine.used + need.total, machine.limit)))


def unwire(limit: int | None) -> None:
    """Set Metal's limit back to what :func:`wire` returned."""
    import mlx.core as mx

    if limit is not None:
        mx.set_wired_limit(limit)


def size(amount: int) -> str:
    """Bytes as people read them."""
    return f"{amount / GIB:.1f} GiB" if amount >= GIB else f"{amount / 2**20:.0f} MiB"
