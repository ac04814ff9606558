"""What `vllm-patches check` runs, one process after the other."""

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from vllm_patches.check import engine, processes, verdict
from vllm_patches.errors import PatchesError, UsageError
from vllm_patches.results import Result

Notify = Callable[[str], None]
_Result = TypeVar("_Result", bound=Result)

_CONNECTORS = {False: "AuditedLogicalConnector", True: "AuditedStockConnector"}
_SILENCE = 900.0
"""Seconds without a line in its log after which a process is given up."""
_SHOWN = 10
"""Lines of a log that are shown."""
_ERROR = re.compile(r"\b[\w.]*(?:Error|Exception|Exit): .+")


def model(arguments: Sequence[str], stock: bool) -> verdict.Checked:
    """Store with one engine, retrieve with another, and compare.

    Args:
        arguments: The model, and vLLM's flags.
        stock: Check LMCache's own connector.

    Raises:
        UsageError: if vLLM refuses a flag.
        PatchesError: if an engine or the server fails, with the errors in its log.

    """

    def check(folder: Path, notify: Notify) -> verdict.Checked:
        answers, notes = _store_and_retrieve(arguments, stock, folder, notify)
        wanted = json.loads((folder / engine.WANTED).read_text())
        _, cached, again, retrieved = answers
        return verdict.Checked(
            model=arguments[0],
            connector=_CONNECTORS[stock].removeprefix("Audited"),
            chunk_size=wanted["chunk_size"],
            prompts=len(retrieved),
            served=[answer.cached_tokens for answer in retrieved],
            difference=verdict.difference(retrieved, cached),
            own_difference=verdict.difference(again, cached),
            stored=verdict.moved(notes[0], "stored"),
            loaded=verdict.moved(notes[1], "loaded"),
            groups=verdict.compare_pages(*notes),
        )

    return _in_private_folder(check)


def pages() -> verdict.PagesChecked:
    """Store and load pages of many geometries, without a model or an engine.

    Raises:
        PatchesError: if it fails, with the errors in its log.

    """

    def check(folder: Path, notify: Notify) -> verdict.PagesChecked:
        notify("KV caches of many geometries, on this device")
        run = _Run(folder, "check of pages", "vllm_patches.check.pages")
        run.until_done({"folder": str(folder)}, lambda: None)
        found = json.loads((folder / "pages.json").read_text())
        return verdict.PagesChecked(
            found["device"],
            [
                verdict.Geometry(
                    **each | {"groups": [verdict.Group(**g) for g in each["groups"]]}
                )
                for each in found["geometries"]
            ],
        )

    return _in_private_folder(check)


def _store_and_retrieve(
    arguments: Sequence[str], stock: bool, folder: Path, notify: Notify
) -> tuple[list[list[verdict.Answer]], list[list[dict[str, Any]]]]:
    """The answers of every pass of both engines, and what each engine's workers noted.

    The server runs from when the first engine has said which it needs.
    """
    lmcache = processes.Server(folder / "server.log", processes.private_env())
    answers, notes = [], []
    try:
        for name, passes in (("stores", 3), ("retrieves", 1)):
            notify(f"the engine that {name}")
            own = folder / name
            own.mkdir()
            flags = ["--model", *arguments]
            job = engine.Job(str(own), lmcache.port, flags, _CONNECTORS[stock], passes)
            run = _Run(folder, f"engine that {name}", "vllm_patches.check.engine")
            run.until_done(asdict(job), _ServerOnDemand(folder, lmcache, notify))
            rounds = json.loads((own / engine.ANSWERS).read_text())
            answers += [[verdict.Answer(**a) for a in done] for done in rounds]
            notes.append(verdict.read_notes(own.glob(engine.NOTES)))
    finally:
        lmcache.stop()
    return answers, notes


class _ServerOnDemand:
    """Starts the LMCache server once an engine has said which it needs."""

    def __init__(self, folder: Path, lmcache: processes.Server, notify: Notify) -> None:
        self._wanted = folder / engine.WANTED
        self._lmcache = lmcache
        self._notify = notify

    def __call__(self) -> None:
        if self._lmcache.is_running or not self._wanted.exists():
            return
        wanted: dict[str, Any] = json.loads(self._wanted.read_text())
        chunk_size = wanted["chunk_size"]
        self._notify(f"an LMCache server, chunks of {chunk_size} tokens")
        needed = sum(engine.CHUNKS) * wanted["chunk_bytes"]
        # Twice as much: it begins to evict before it is full.
        gigabytes = 2 + 2 * needed // 2**30
        self._lmcache.start(chunk_size=chunk_size, l1_size_gb=gigabytes)


class _Run:
    """A module's process."""

    def __init__(self, folder: Path, name: str, module: str) -> None:
        self._name = name
        self._module = module
        slug = name.replace(" ", "-")
        self._job, self._log = folder / f"{slug}.json", folder / f"{slug}.log"

    def until_done(self, job: dict[str, Any], meanwhile: Callable[[], None]) -> None:
        """Run it to its end, calling ``meanwhile`` now and then.

        Raises:
            UsageError: if it refuses its command line.
            PatchesError: if it fails, or says nothing for too long.

        """
        self._job.write_text(json.dumps(job))
        env = processes.private_env()
        with (
            self._log.open("wb") as log,
            processes.guarded(
                self._module, [str(self._job)], log.fileno(), env
            ) as process,
        ):
            status = self._wait(process, meanwhile)
        if status == 2:
            *_, refusal = self._log.read_text(errors="replace").strip().split("\n")
            raise UsageError(refusal.partition(": error: ")[2] or refusal)
        if status:
            raise self._failure(f"ended with status {status}")

    def _wait(self, process: subprocess.Popen, meanwhile: Callable[[], None]) -> int:
        said, since = 0, time.monotonic()
        while (status := process.poll()) is None:
            try:
                meanwhile()
            except processes.StepFailed as e:
                raise PatchesError(str(e), _reasons(e.log)) from None
            if said != (said := self._log.stat().st_size):
                since = time.monotonic()
            if time.monotonic() - since > _SILENCE:
                raise self._failure(f"said nothing for {_SILENCE / 60:.0f} minutes")
            time.sleep(0.1)
        return status

    def _failure(self, what: str) -> PatchesError:
        message = f"the {self._name} {what}; its log is {self._log}"
        return PatchesError(message, _reasons(self._log))


def _reasons(log: Path | None) -> list[str]:
    """The errors in a log, the first ones first; without any, its end."""
    text = log.read_text(errors="replace") if log else ""
    errors = list(dict.fromkeys(_ERROR.findall(text)))
    return errors[:_SHOWN] or text.splitlines()[-_SHOWN:]


def _in_private_folder(check: Callable[[Path, Notify], _Result]) -> _Result:
    """Check in a folder that stays, with its logs, only if something is wrong.

    A signal to end ends what runs first.
    """

    def end(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    before = {s: signal.signal(s, end) for s in (signal.SIGTERM, signal.SIGHUP)}
    folder = Path(tempfile.mkdtemp(prefix="vllm-patches-check-"))
    stays = False
    try:
        with progress(Console(stderr=True)) as notify:
            result = check(folder, notify)
            if stays := result.failed:
                notify(f"the logs are in {folder}")
        return result
    except PatchesError as e:
        stays = not isinstance(e, UsageError)
        raise
    finally:
        if not stays:
            shutil.rmtree(folder)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def progress(console: Console) -> Iterator[Notify]:
    """Prints each step as it starts, with the seconds since the first."""
    started = time.monotonic()
    with console.status("") as status:

        def notify(step: str) -> None:
            console.print(f"{time.monotonic() - started:6.1f} s  {step}")
            status.update(step)

        yield notify
