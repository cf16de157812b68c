"""The command line. Everything heavy is imported by the command that needs it."""

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="dflash-rag",
    help="Answers from your own documents, on your own machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="Weights: what there is, and fetching it.", no_args_is_help=True)
app.add_typer(models_app, name="models")

Home = Annotated[Path | None, typer.Option("--home", help="The state folder.", show_default="var")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


@app.command()
def demo(home: Home = None, as_json: Json = False) -> None:
    """Ingest the samples, serve, ask, and print the answers with their pages and timings.

    With --json it runs on a temporary home. Exit status 0 only if every expected page came first.
    """
    from . import demo

    raise typer.Exit(demo.run(_settings(home=home), as_json=as_json))


@app.command()
def ingest(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Files and folders.", show_default="data")
    ] = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Read and embed everything anew.")
    ] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Bring the index in step with your documents: new, changed and deleted ones.

    While a server runs on the same home, it does the work. Exit status 1 if a file failed.
    """
    from . import ingesting

    settings = _settings(home=home)
    raise typer.Exit(
        ingesting.run(settings, paths or [settings.data], rebuild=rebuild, as_json=as_json)
    )


@app.command()
def serve(
    home: Home = None,
    host: Annotated[str | None, typer.Option(help="Address.", show_default="127.0.0.1")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port; 0 picks a free one.", show_default="8080")
    ] = None,
) -> None:
    """Answer questions over HTTP, with the chat page on /."""
    from . import serving

    raise typer.Exit(serving.run(_settings(home=home, host=host, port=port)))


@app.command()
def doctor(home: Home = None, as_json: Json = False) -> None:
    """Say what is wrong with this installation and how to mend it. Exit status 1 if anything is."""
    from . import doctor

    raise typer.Exit(doctor.run(_settings(home=home), as_json=as_json))


@app.command()
def bench(
    quick: Annotated[bool, typer.Option("--quick", help="A few prompts, in two minutes.")] = False,
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            help="passages, again, chat, code or chinese; may be repeated.",
            show_default="all",
        ),
    ] = None,
    count: Annotated[int, typer.Option(help="Prompts of each kind.")] = 10,
    tokens: Annotated[int, typer.Option(min=2, help="The longest answer.")] = 64,
    peers: Annotated[
        Path | None,
        typer.Option(help="A folder with environments of dflash, dflash-mlx, mlx-dspark."),
    ] = None,
    wordings: Annotated[
        Path | None,
        typer.Option(help="A CSV (text, category) with the questions of `again` in other words."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot there (.png).")] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Compare this engine with mlx-lm, and with other engines installed in --peers.

    Exit status 1 if an answer is not word for word mlx-lm's.
    """
    from . import bench

    raise typer.Exit(
        bench.run(
            _settings(home=home),
            quick=quick,
            kinds=kinds or [],
            count=count,
            tokens=tokens,
            peers_folder=peers,
            wordings=wordings,
            plot_to=plot,
            as_json=as_json,
        )
    )


@app.command("train-draft")
def train_draft(
    target: Annotated[
        str | None, typer.Option(help="The model to make a draft for.", show_default="settings")
    ] = None,
    documents: Annotated[
        list[Path] | None,
        typer.Option(help="Files and folders; may be repeated.", show_default="data"),
    ] = None,
    hours: Annotated[
        float, typer.Option(min=0.01, help="Time for answers and training together.")
    ] = 2.0,
    start: Annotated[
        str | None,
        typer.Option("--from", help="A draft to begin as, by name or folder.", show_default="new"),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=16,
            help="Tokens of a block; it drafts one less.",
            show_default="8, or that of --from",
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(help="The draft's folder.", show_default="drafts in the state folder"),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            help="Where to keep what a later run goes on with.",
            show_default="training in the state folder",
        ),
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Make a DFlash draft for the target, from its own answers about your documents.

    Give the command again to go on with a run that was interrupted.
    """
    from . import train_draft

    settings = _settings(home=home, target_model=target)
    raise typer.Exit(
        train_draft.run(
            settings,
            documents=documents or [settings.data],
            hours=hours,
            start=start,
            block_size=block_size,
            folder=run,
            to=to,
            as_json=as_json,
        )
    )


@models_app.command("list")
def models_list(home: Home = None, as_json: Json = False) -> None:
    """Short names, targets with their drafts, what they need of memory, and what is here."""
    from . import models

    models.show(_settings(home=home), as_json=as_json)


@models_app.command("pull")
def models_pull(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names as in the settings.", show_default="those the settings name"),
    ] = None,
    home: Home = None,
) -> None:
    """Fetch weights. The only command that uses the network."""
    from dflash_engine import hub

    settings = _settings(home=home)
    for name in names or settings.model_names:
        folder = hub.pull(name, settings.models_folder, typer.echo)
        typer.echo(f"{name}: {folder}")


def _settings(**flags: Any) -> Any:
    from .settings import load

    return load(**flags)


def main() -> None:
    """Run the command line; errors that people can mend are told in a line."""
    try:
        app()
    except Exception as error:
        if not _mendable(error):
            raise
        typer.secho(f"dflash-rag: {error}", fg="red", err=True)
        raise SystemExit(3) from None


def _mendable(error: Exception) -> bool:
    # By name, so that a command that failed early does not import the packages for it. OSError and
    # sqlite3's are full disks, folders that cannot be written, a damaged library.
    mendable = {"AppError", "EngineError", "IngestError", "OSError", "DatabaseError"}
    return any(kind.__name__ in mendable for kind in type(error).__mro__)


if __name__ == "__main__":
    main()
