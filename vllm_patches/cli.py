"""The command line, `vllm-patches`."""

import contextlib
import functools
import inspect
import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_patches import __version__, actions
from vllm_patches import fingerprint as fingerprints
from vllm_patches.check import command as checks
from vllm_patches.errors import STATUS, PatchesError, UsageError
from vllm_patches.results import Compared, Result, Rows


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"vllm-logical-blocks {__version__}")
        raise typer.Exit


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


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Say this tool's version.", callback=_say_version
        ),
    ] = False,
) -> None:
    """Before every command."""


Root = Annotated[
    Path | None,
    typer.Option(
        "--target",
        "--python",
        metavar="PATH",
        help="The folder that holds vllm/ (a site-packages, an unpacked wheel or a "
        "checkout), or the Python that imports it.",
        show_default="the vLLM of this environment",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document, for machines.")
]
Ranks = Annotated[int, typer.Option(metavar="N", min=1)]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, change nothing.")
]


class Ended(BaseException):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.status = 128 + number


@contextlib.contextmanager
def _ending_tidily() -> Iterator[None]:
    """Have SIGTERM and SIGHUP undo what is under way, as Ctrl-C does."""

    def end(number: int, frame: object) -> None:
        raise Ended(number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    old = {n: signal.signal(n, end) for n in numbers} if _in_main_thread() else {}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def command(
    function: Callable[..., Result], context_settings: dict[str, Any] | None = None
) -> Callable[..., Result]:
    """Add a command that prints its function's result, with `--json` for machines.

    What is wrong is one line on stderr, its report's lines and an exit status."""

    @functools.wraps(function)
    def run(*arguments: Any, as_json: bool, **options: Any) -> None:
        try:
            with _ending_tidily():
                result = function(*arguments, **options)
        except (PatchesError, OSError, Ended) as error:
            details = error.details if isinstance(error, PatchesError) else []
            message = " ".join(str(error).split("\n"))
            code = error.code if isinstance(error, PatchesError) else "system"
            if not isinstance(error, PatchesError):
                message += "; `vllm-patches status` says what state vLLM is in"
            _print_error(message, details)
            if as_json:
                _print_json({"error": message, "code": code, "report": details})
            status = error.status if isinstance(error, Ended) else STATUS.get(code, 1)
            raise typer.Exit(status) from None
        if as_json:
            wrong: dict[str, Any] = {
                "error": result.error,
                "code": result.code,
                "report": [],
            }
            _print_json(result.document() | (wrong if result.error else {}))
        else:
            _print_result(result)
        if result.error:
            _print_error(result.error)
        if result.failed:
            raise typer.Exit(STATUS.get(result.code, 1))

    own = inspect.signature(function)
    json_option = inspect.Parameter(
        "as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json
    )
    parameters = [*own.parameters.values(), json_option]
    signature = inspect.Signature(parameters, return_annotation=None)
    setattr(run, "__signature__", signature)  # noqa: B010
    run.__annotations__ = {**function.__annotations__, "as_json": Json}
    app.command(context_settings=context_settings)(run)
    return function


@command
def releases() -> Result:
    """List the vLLM releases that there are patches for."""
    return actions.supported()


@command
def status(
    root: Root = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Fail unless it is patched by this version's series and every Python "
            "file is as recorded. Exit status: 3 unpatched, 4 out of date, 5 "
            "interrupted, 6 changed, 7 busy, 8 release not supported, 9 no vLLM.",
        ),
    ] = False,
) -> Result:
    """Say which vLLM this is and whether it is patched."""
    return actions.check(root) if check else actions.status(root)


@command
def apply(
    root: Root = None,
    dry_run: DryRun = False,
    if_needed: Annotated[
        bool, typer.Option("--if-needed", help="Patched already is no error.")
    ] = False,
    update: Annotated[
        bool,
        typer.Option(
            "--update",
            help="Patched by another version: go over to this one's patches.",
        ),
    ] = False,
    release: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="For a build that has no series: the release whose series to apply, "
            "if every hunk of it fits (at other lines, but unchanged).",
        ),
    ] = None,
) -> Result:
    """Patch vLLM. Every file must be as its release shipped it."""
    return actions.apply(root, dry_run, if_needed, update, release)


@command
def revert(root: Root = None, dry_run: DryRun = False) -> Result:
    """Put vLLM back, byte for byte, as it was installed."""
    return actions.revert(root, dry_run)


@command
def verify(root: Root = None) -> Result:
    """Recompute the hash and size of every file that vLLM's RECORD lists."""
    return actions.verify(root)


@command
def diff(root: Root = None) -> Result:
    """Show what `apply` changed, as a patch."""
    return actions.diff(root)


@command
def wheel(
    source: Annotated[
        Path, typer.Argument(metavar="IN.whl", help="A pristine vLLM wheel.")
    ],
    folder: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="Where to write it."),
    ],
    dry_run: DryRun = False,
) -> Result:
    """Build a patched wheel from a pristine one (CUDA, ROCm or CPU).

    Its version gets a local tag, 0.32.0+logical.3.d0123abcd, that names its patches.
    The same wheel gives the same bytes. Beside it: a checksum file."""
    return actions.build_wheel(source, folder, dry_run)


@command
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
    signoff: Annotated[
        str | None,
        typer.Option(
            metavar='"NAME <EMAIL>"', help="Add a Signed-off-by line to each patch."
        ),
    ] = None,
    dry_run: DryRun = False,
) -> Result:
    """Write the patches as files that `git am` takes, for a checkout of vLLM."""
    return actions.export(folder, root, release, dry_run, signoff)


@command
def fingerprint(
    here: Annotated[
        Path,
        typer.Argument(metavar="A", help="One engine's log, or a part of it."),
    ],
    there: Annotated[Path, typer.Argument(metavar="B", help="Another's.")],
) -> Result:
    """Explain why two engines do not share their KV cache, field by field.

    Exits 0 if they do share it, 1 if not.
    """
    a, b = fingerprints.read(here), fingerprints.read(there)
    return Compared(a.digest, b.digest, fingerprints.explain(a, b))


_passes_on = {"allow_extra_args": True, "ignore_unknown_options": True}


@functools.partial(command, context_settings=_passes_on)
def check(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL [FLAG]...",
            help="What `vllm serve` takes: a model, then vLLM's own engine flags.",
            show_default=False,
        ),
    ] = None,
    stock: Annotated[
        bool, typer.Option("--stock", help="Check LMCache's own connector instead.")
    ] = False,
    pages: Annotated[
        bool,
        typer.Option(
            "--pages", help="No model: KV caches of many geometries, on this device."
        ),
    ] = False,
) -> Result:
    """Check in this environment that LMCache gives back the pages it was given.

    One engine stores, another one retrieves, through a private LMCache server, and the
    bytes of every page are compared. Exits 0 only if all agree and LMCache served
    every prompt, 1 if not, 2 if vLLM does not know a flag. Running servers are left
    alone.
    """
    if pages is (model is not None):
        raise UsageError("Give either MODEL or --pages.")
    if pages and (stock or context.args):
        raise UsageError("--pages takes no engine flags and no --stock.")
    if model is None:
        return checks.pages()
    return checks.model([model, *context.args], stock)


@command
def explain(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="A config.json, or the folder it is in."),
    ],
    attention_backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="vLLM's name of it, such as FLASH_ATTN.",
            show_default="the CPU's",
        ),
    ] = None,
    kernel_block_size: Annotated[
        list[int] | None,
        typer.Option(
            metavar="TOKENS",
            help="Kernel blocks that the backend takes; once for each size.",
            show_default="what the backend says",
        ),
    ] = None,
    tensor_parallel_size: Ranks = 1,
    pipeline_parallel_size: Ranks = 1,
    decode_context_parallel_size: Ranks = 1,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(metavar="NAME", show_default="the model's")
    ] = None,
    mamba_cache_mode: Annotated[
        str | None, typer.Option(metavar="MODE", show_default="vLLM's")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(metavar="TOKENS", min=1, show_default="vLLM's")
    ] = None,
    kv_cache_layout: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="VLLM_KV_CACHE_LAYOUT.", show_default="vLLM's"
        ),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw one page of every group, to scale."),
    ] = None,
) -> Result:
    """Say what vLLM will do to a model's KV cache, and which commands serve it.

    Needs no weights, GPU or network, but the vLLM and LMCache of this environment.
    Exits 0 if it can be served, 1 if not.
    """
    from vllm_patches import explain as explain_room

    options = explain_room.Options(
        attention_backend,
        tuple(kernel_block_size or ()),
        tensor_parallel_size,
        pipeline_parallel_size,
        decode_context_parallel_size,
        kv_cache_dtype,
        mamba_cache_mode,
        block_size,
        kv_cache_layout,
    )
    return explain_room.explain(model, options, svg)


def _print_error(message: str, details: Sequence[str] = ()) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[bold red]error:[/] {escape(message)}")
    for line in details:
        console.print(f"  {escape(line)}")


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2))


def _print_result(result: Result) -> None:
    """Lines, or on a terminal a table if the result has rows."""
    console = Console()
    if isinstance(result, Rows) and console.is_terminal:
        table = Table(*result.header, show_header=bool(result.header), box=None)
        if not result.header:
            table.add_column(style="bold")
            table.add_column(overflow="fold")
        for row in result.rows():
            table.add_row(*map(escape, row))
        console.print(table)
        for line in result.notes():
            console.print(escape(line), highlight=False, soft_wrap=True)
        return
    for line in result.lines():
        print(line)
