"""What an engine is made of: weights checked for size and loaded, drafters put together, and what
is kept between requests.
"""

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from . import fit, hub
from .drafters import Drafter
from .drafters.block import Block
from .drafters.compose import Compose, Guesser
from .drafters.kind import kind_of
from .drafters.lookup import Lookup
from .drafters.memory import Memory
from .drafters.small import Small
from .options import Options
from .prefix import Prefixes
from .targets import Target
from .targets import load as load_target
from .width import load_or_measure

_LOG = logging.getLogger(__name__)
_MEMORY, _PREFIXES = "memory.bin", "prefixes"  # in an engine's store


@dataclass(frozen=True)
class Parts:
    """The loaded ``target``, what drafts for it, and what is kept of earlier requests. ``wired`` is
    Metal's limit before.
    """

    target: Target
    drafter: Drafter | None
    memory: Memory | None
    prefixes: Prefixes | None
    wired: int | None

    def close(self) -> None:
        """Keep what is to be kept on disk, and give memory back."""
        if self.memory:
            self.memory.close()
        if self.prefixes:
            self.prefixes.close()
        fit.unwire(self.wired)


def load(options: Options) -> Parts:
    """Load an engine's parts, on the thread that will own them.

    Raises NotEnoughMemoryError before anything is loaded, and the errors of targets and drafts.
    """
    machine = fit.Machine.here()
    precision = fit.resolve_precision(options.target, options.precision, machine)
    need = fit.check(
        options.target,
        options.draft,
        context=options.context,
        precision=precision,
        kv_bits=options.kv_bits,
        draft_bits=options.draft_bits,
        machine=machine,
    )
    wired = fit.wire(machine, need)
    target = load_target(
        options.target, options.target_name, precision, options.kv_bits, need.context
    )
    store = options.store
    weights = hub.identity(options.target)
    identity = json.dumps(
        [
            weights,
            hub.identity(options.draft) if options.draft else None,
            precision,
            options.kv_bits,
            options.draft_bits,
        ]
    )
    memory = None
    if options.drafter == "composed" and options.memory_tokens:
        memory = Memory(store and store / _MEMORY, key=weights, most_tokens=options.memory_tokens)
    if store:
        _remove_unused(store, memory=memory is not None, prefixes=options.prefix_disk_bytes > 0)
    drafter = _drafter(options, target, memory, identity)
    prefixes = None
    if options.prefix_bytes:
        prefixes = Prefixes(
            json.dumps([identity, *map(version, ("mlx", "mlx-lm", "dflash-rag"))]),
            memory_bytes=options.prefix_bytes,
            folder=store and store / _PREFIXES,
            disk_bytes=options.prefix_disk_bytes,
        )
    return Parts(target, drafter, memory, prefixes, wired)


def forget(store: Path, memory_tokens: int, gone: Callable[[set[str]], set[str]]) -> None:
    """What :meth:`dflash_engine.DFlash.forget` does, in the store of an engine that is not running.

    ``gone`` is given the documents that something is remembered of, and returns those to forget.
    """
    if memory_tokens:
        memory = Memory(store / _MEMORY, key=None, most_tokens=memory_tokens)
        memory.forget(*gone(memory.owners))
        memory.close()
    _remove_unused(store, memory=memory_tokens > 0, prefixes=False)


def _remove_unused(store: Path, *, memory: bool, prefixes: bool) -> None:
    # What an earlier engine kept there and this one has no use for: nobody would make it forget.
    if not memory:
        with suppress(FileNotFoundError):
            (store / _MEMORY).unlink()
    if not prefixes:
        shutil.rmtree(store / _PREFIXES, ignore_errors=True)


def _drafter(
    options: Options, target: Target, memory: Memory | None, identity: str
) -> Drafter | None:
    if options.drafter == "none":
        return None
    target.require_rollback()
    model: Drafter | None = None
    if options.draft and kind_of(options.draft) == "small":
        model = Small(options.draft, target)
    elif options.draft:
        model = Block(options.draft, target, options.draft_bits)
    if options.drafter != "composed":
        return model or Lookup()
    guessers: list[Guesser] = [*([memory] if memory else []), Lookup()]
    costs = load_or_measure(options.store, identity, target, model)
    return Compose(guessers, model, costs, width=options.width)
