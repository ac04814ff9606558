"""The command line, `vllm-patches`."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_patches import actions
from vllm_patches import fingerprint as fingerprints
from vllm_patches.errors import PatchesError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=(
        "Patch an installed vLLM so that it hands its KV cache to KV connectors as "
        "the block ids address it, and take the patches out again.\n\n"
        "Nothing is ever half done: each command changes everything it has to or "
        "nothing, and says on one line what is wrong."
    ),
)

Root = Annotated[
    Path | None,
    typer.Option(
        "--target",
        metavar="PATH",
        help="The folder that holds vllm/: a site-packages, an unpacked wheel or a "
        "checkout.",
        show_default="the vLLM of this environment",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document, for machines.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, change nothing.")
]


@app.command()
def releases(as_json: Json = False) -> None:
    """List the vLLM releases that there are patches for."""
    with _errors(as_json):
        documents = actions.supported()
        if as_json:
            _print_json({"releases": documents})
            return
        _print_table(
            ("vLLM", "torch", "tested with LMCache", "patches", "contract"),
            [
                (
                    document["release"],
                    document["torch"],
                    ", ".join(document["lmcache"]),
                    str(len(document["patches"])),
                    str(document["contract"]),
                )
                for document in documents
            ],
        )


@app.command()
def status(root: Root = None, as_json: Json = False) -> None:
    """Say which vLLM this is and whether it is patched."""
    with _errors(as_json):
        document = actions.status(root)
        if as_json:
            _print_json(document)
            return
        rows = [("vLLM", _name(document)), ("where", document["root"])]
        rows.append(("state", _state(document)))
        if "release" in document:
            rows.append(("series", f"v{document['release']}"))
            rows += [("patch", name) for name in document["patches"]]
        if document.get("contract") is not None:
            rows.append(("contract", str(document["contract"])))
        _print_table((), rows)


@app.command()
def apply(root: Root = None, dry_run: DryRun = False, as_json: Json = False) -> None:
    """Patch vLLM. Every file must be as its release shipped it."""
    with _errors(as_json):
        document = actions.apply(root, dry_run)
        if as_json:
            _print_json(document | {"dry_run": dry_run})
            return
        _print_undone(document, dry_run)
        if "patches" not in document:
            return
        counts = (
            f"release {document['release']}, {len(document['patches'])} patches, "
            f"{len(document['modified'])} files modified, {len(document['new'])} new"
        )
        verb = "can be patched" if dry_run else "patched"
        _print(f"{verb}: {_name(document)} in {document['root']} ({counts})")


@app.command()
def revert(root: Root = None, dry_run: DryRun = False, as_json: Json = False) -> None:
    """Put vLLM back, byte for byte, as it was installed."""
    with _errors(as_json):
        document = actions.revert(root, dry_run)
        if as_json:
            _print_json(document | {"dry_run": dry_run})
            return
        _print_undone(document, dry_run)
        verb = "can be put back" if dry_run else "as installed"
        _print(f"{verb}: {_name(document)} in {document['root']}")


@app.command()
def verify(root: Root = None, as_json: Json = False) -> None:
    """Recompute the hash and size of every file that vLLM's RECORD lists."""
    with _errors(as_json):
        document = actions.verify(root)
        bad = document["mismatches"]
        if as_json:
            _print_json(document)
        else:
            for mismatch in bad:
                _print(f"{mismatch['problem']}: {mismatch['path']}")
        if bad:
            raise PatchesError(
                f"{len(bad)} files of {_name(document)} in {document['root']} are not "
                "as recorded; undo that or reinstall it"
            )
        if not as_json:
            _print(f"as recorded: {_name(document)} in {document['root']}")


@app.command()
def wheel(
    source: Annotated[
        Path, typer.Argument(metavar="IN.whl", help="A pristine vLLM wheel.")
    ],
    folder: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="Where to write it."),
    ],
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Build a patched wheel from a pristine one (CUDA, ROCm or CPU).

    Its version gets a local tag, 0.32.0+logical.1. The same wheel gives the same
    bytes."""
    with _errors(as_json):
        document = actions.build_wheel(source, folder, dry_run)
        if as_json:
            _print_json(document | {"dry_run": dry_run})
        elif dry_run:
            _print(f"can be built: {document['wheel']}")
        else:
            _print(f"built: {document['wheel']}")
            _print(f"sha256: {document['sha256']}")


@app.command()
def export(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A new folder to write them to.")
    ],
    root: Root = None,
    release: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="The vLLM release to export for.",
            show_default="the target's",
        ),
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Write the patches as files that `git am` takes, for a checkout of vLLM."""
    with _errors(as_json):
        document = actions.export(folder, root, release, dry_run)
        if as_json:
            _print_json(document | {"dry_run": dry_run})
            return
        verb = "can be exported" if dry_run else "exported"
        files = f"{len(document['files'])} patches for vLLM {document['release']}"
        _print(f"{verb}: {files} to {document['folder']}")
        if not dry_run:
            _print(f"in the checkout: git am {folder.resolve()}/*.patch")


@app.command()
def fingerprint(
    here: Annotated[
        Path,
        typer.Argument(metavar="A", help="One engine's log, or a part of it."),
    ],
    there: Annotated[Path, typer.Argument(metavar="B", help="Another's.")],
    as_json: Json = False,
) -> None:
    """Explain why two engines do not share their KV cache, field by field.

    Exits 0 if they do share it, 1 if not.
    """
    with _errors(as_json):
        a, b = fingerprints.read(here), fingerprints.read(there)
        differences = fingerprints.explain(a, b)
        if as_json:
            _print_json(
                {"here": a.digest, "there": b.digest, "differences": differences}
            )
        for line in [] if as_json else differences:
            _print(line)
        if differences:
            raise typer.Exit(1)
        if not as_json:
            _print(f"the same: {a.digest}")


@contextlib.contextmanager
def _errors(as_json: bool) -> Iterator[None]:
    """Turn an error into one line on stderr, its report's lines and exit status 1."""
    try:
        yield
    except (PatchesError, OSError) as error:
        details = error.details if isinstance(error, PatchesError) else []
        message = " ".join(str(error).split("\n"))
        if isinstance(error, OSError):
            message += "; `vllm-patches status` says what state vLLM is in"
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print(f"[bold red]error:[/] {escape(message)}")
        for line in details:
            console.print(f"  {escape(line)}")
        if as_json:
            _print_json({"error": message, "report": details})
        raise typer.Exit(1) from None


def _name(document: dict[str, Any]) -> str:
    return f"{document['distribution']} {document['version']}"


def _state(document: dict[str, Any]) -> str:
    state = document["state"]
    if state == "interrupted":
        return (
            f"interrupted: an {document['interrupted']} died half way; the next apply "
            "or revert undoes it first"
        )
    if state == "busy":
        return "busy: another vllm-patches is at work on it"
    if state == "editable":
        return "editable install of a checkout: see `vllm-patches export --help`"
    if state == "patched":
        return "patched" + (" (from a patched wheel)" if "by" in document else "")
    return "unpatched" if document["supported"] else "unpatched, release not supported"


def _print_undone(document: dict[str, Any], dry_run: bool) -> None:
    if was := document["undone"]:
        verb = "would be undone" if dry_run else "undone"
        _print(f"{verb}: an {was} that died half way")


def _print(line: str) -> None:
    Console(soft_wrap=True, highlight=False).print(escape(line))


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2))


def _print_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """A table on a terminal, lines with tabs elsewhere."""
    console = Console()
    if not console.is_terminal:
        for row in rows:
            print("\t".join(row))
        return
    table = Table(*header, show_header=bool(header), box=None)
    if not header:
        table.add_column(style="bold")
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
