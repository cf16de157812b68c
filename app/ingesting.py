"""``dflash-rag ingest``: by this process, or by the server that owns the home."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from httpx_sse import connect_sse
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from dflash_engine import parts
from ingest import Home, IngestEvent, Owner

from .errors import ServerFailedError
from .service import gone, open_embedder, open_index, store
from .service import ingest as work
from .settings import Settings

FAILED = 1  # exit status: some file was not ingested


def run(settings: Settings, paths: Sequence[Path], *, rebuild: bool, as_json: bool) -> int:
    """Ingest ``paths``, show how it goes, and return the exit status."""
    console = Console(stderr=as_json)
    with Bar(console) as bar:
        summary = ingest(settings, paths, rebuild=rebuild, on_event=bar.show)
    if as_json:
        sys.stdout.write(json.dumps(summary, ensure_ascii=False) + "\n")
    else:
        print_summary(console, summary)
    return FAILED if summary["failed"] else 0


def ingest(
    settings: Settings,
    paths: Sequence[Path],
    *,
    rebuild: bool = False,
    on_event: Callable[[IngestEvent], None] = lambda event: None,
) -> dict[str, Any]:
    """Ingest ``paths`` and return the summary. The owner of the home does the work."""
    home = Home(settings.home)
    owner = home.owner()
    if owner is not None and owner.url:
        return _hand_over(owner, paths, rebuild, on_event)
    with home.lock():
        embedder = open_embedder(settings)
        with open_index(settings, home, embedder, rebuild=rebuild) as index:
            kept = store(settings)

            def forget() -> None:
                parts.forget(kept, settings.memory_tokens, lambda ids: gone(index, ids))

            return work(index, paths, on_event, forget, rebuild).to_dict()


def _hand_over(
    owner: Owner, paths: Sequence[Path], rebuild: bool, on_event: Callable[[IngestEvent], None]
) -> dict[str, Any]:
    body = {"paths": [str(path.absolute()) for path in paths], "rebuild": rebuild}
    headers = {"Authorization": f"Bearer {owner.token}"}
    try:
        with (
            # On the loopback, and never through a proxy; a large file may take its time.
            httpx.Client(trust_env=False, timeout=httpx.Timeout(10, read=None)) as client,
            connect_sse(
                client, "POST", f"{owner.url}/documents/ingest", json=body, headers=headers
            ) as source,
        ):
            if source.response.status_code != 200:
                reason = json.loads(source.response.read())["error"]["message"]
                raise ServerFailedError(f"the server at {owner.url} refused: {reason}")
            for event in source.iter_sse():
                data: dict[str, Any] = event.json()
                match event.event:
                    case "progress":
                        on_event(IngestEvent(**data))
                    case "summary":
                        return data
                    case "error":
                        raise ServerFailedError(data["message"])
    except httpx.HTTPError as error:
        raise ServerFailedError(
            f"the server at {owner.url} (process {owner.pid}) did not finish the ingest: {error}. "
            "What it had done stays; run this again"
        ) from error
    raise ServerFailedError(f"the server at {owner.url} stopped: run this again")


class Bar:
    """A progress bar over files."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[step]}", markup=False),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None

    def show(self, event: IngestEvent) -> None:
        """Move the bar on."""
        if self._task is None:
            return
        step = _printable(event.file)
        if event.kind == "embedding":
            step += f" ({event.passages}/{event.of_passages} passages)"
        ended = event.kind in ("done", "failed", "unchanged")
        self._progress.update(
            self._task,
            total=event.total or None,
            completed=event.index if ended else None,
            step=step,
        )

    def __enter__(self) -> "Bar":
        self._progress.start()
        self._task = self._progress.add_task("ingest", total=None, step="")
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def print_summary(console: Console, summary: dict[str, Any]) -> None:
    """What was done, and each file that failed with its reason."""
    console.print(
        f"[bold]{summary['files']}[/] files read, {summary['unchanged']} unchanged, "
        f"{summary['removed']} removed; {summary['pages']} pages, "
        f"[bold]{summary['passages']}[/] passages ({summary['embedded']} embedded) "
        f"in {summary['seconds']:.1f} s"
    )
    for warning in summary["warnings"]:
        console.print(
            f"  warning: {_printable(warning)}", style="yellow", markup=False, highlight=False
        )
    for failed in summary["failed"]:
        console.print(
            f"  failed: {_printable(failed['file'])}: {failed['reason']}",
            style="red",
            markup=False,
            highlight=False,
        )


def _printable(name: str) -> str:
    # A file's name may hold anything, and a terminal obeys some of it.
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
