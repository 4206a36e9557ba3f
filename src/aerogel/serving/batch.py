"""`aerogel batch`: a model over many images, by Ray Data.

A row of the dataset is a part of the input; an actor reads its images, runs them and writes its file. So a
part is what Ray tries again, and what a driver that was killed finds done.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from aerogel import __version__
from aerogel.addresses import filesystem
from aerogel.errors import AerogelError, InvalidArgument, printable
from aerogel.ir import Array
from aerogel.preprocess import NoImage, Recipe
from aerogel.progress import Progress
from aerogel.serving.cluster import check_ray, cluster, cpus
from aerogel.serving.inputs import Part, listed, read
from aerogel.serving.predictor import Predictor, Rows
from aerogel.serving.results import Folder, Row, part_name

RETRIES = 3
"""How often Ray begins an actor anew, and a part again. Its own default is without end."""
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """What is asked for. `preprocess` is a recipe's text, or `module:function` from bytes to an array,
    which is found from `folder`."""

    model: str
    input: str
    output: str
    workers: int = 1
    threads: int = 1
    batch: int = 32
    rows: int = 1000
    preprocess: str | None = None
    folder: str = "."


@dataclass(frozen=True)
class Done:
    """What was run now, and what was there before."""

    images: int
    errors: int
    files: int
    found: int
    skipped: int
    seconds: float


class Parts:
    """The actor: called by Ray Data with one part at a time."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.job = Job(**job)
        self.predictor = Predictor(self.job.model, cpus())
        self.input = self.predictor.alone()
        self.prepared = prepared(self.job, self.predictor.fast.preprocess)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        counts = [self.run(part(text)) for text in batch["part"]]
        return {"images": [n for n, _ in counts], "errors": [n for _, n in counts]}

    def run(self, asked: Part) -> tuple[int, int]:
        """Write a part's file; how many images and errors it has."""
        fs, _ = filesystem(self.job.input)
        folder = Folder(self.job.output)
        return folder.write(
            asked.number, map(self._rows, ahead(read(fs, asked, self.job.batch))), self.predictor.outputs
        )

    def _rows(self, images: list[tuple[str, bytes | NoImage]]) -> list[Row]:
        """Each image with its outputs, or with why there are none."""
        arrays = [self._array(encoded) for _, encoded in images]
        asked = [{self.input: a[None]} for a in arrays if not isinstance(a, NoImage)]
        answers = iter(self.predictor.together(asked))
        found = [a if isinstance(a, NoImage) else _only(next(answers)) for a in arrays]
        return [(name, one) for (name, _), one in zip(images, found, strict=True)]

    def _array(self, encoded: bytes | NoImage) -> Array | NoImage:
        if isinstance(encoded, NoImage):
            return encoded
        try:
            return self.prepared(encoded)
        except NoImage as why:
            return why


def _only(answer: Rows | AerogelError) -> Rows | NoImage:
    """The only row of an answer."""
    if isinstance(answer, AerogelError):
        return NoImage(str(answer))
    return {name: value[0] for name, value in answer.items()}


def prepared(job: Job, saved: str | None) -> Callable[[bytes], Array]:
    """From an encoded image to what the model takes: as asked for, else as saved with the model."""
    text = saved if job.preprocess is None else job.preprocess
    if text is None:
        raise AerogelError(
            "nothing says how an image becomes an input: say --resize, --crop, --mean, --std, or "
            "--preprocess module:function; or save it with the model: aerogel compile --preprocess"
        )
    return function(text, job.folder) if ":" in text else Recipe.parse(text).decoded


def function(text: str, folder: str) -> Callable[[bytes], Array]:
    """A user's own, found from the folder the command was called in. What it raises is the image's error."""
    module, _, name = text.partition(":")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        own = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as why:
        raise InvalidArgument(f"--preprocess {printable(text)[:80]}: {printable(why)[:200]}") from why

    def run(encoded: bytes) -> Array:
        try:
            made: Array = own(encoded)
        except Exception as why:
            raise NoImage(f"{text}: {type(why).__name__}: {str(why)[:200]}") from None
        return made

    return run


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same, with the next one read while this one runs."""
    with ThreadPoolExecutor(1) as beside:
        coming = beside.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = beside.submit(next, items, None)
            yield item


def part(text: str) -> Part:
    said: dict[str, Any] = json.loads(text)
    whole: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in said.items()}
    return Part(**whole)


def run(job: Job, progress: Progress) -> Done:
    """Run what has not been run yet."""
    began = time.monotonic()
    paths: dict[str, Any] = {
        name: _absolute(getattr(job, name)) for name in ("model", "input", "output", "folder")
    }
    job = replace(job, **paths)
    if f"{job.output}/".startswith(f"{job.input.rstrip('/')}/"):
        raise InvalidArgument("--output lies in --input: results would be listed with the images")
    check_ray()
    folder = Folder(job.output)
    folder.check()
    progress.begin("reading the model")
    said = look(job)
    progress.begin("listing the images")
    inputs = listed(job.input, job.rows)
    said |= {
        "input": job.input,
        "images": inputs.count,
        "listed": inputs.digest,
        "batch": job.batch,
        "rows": job.rows,
    }
    folder.begin(said)
    there = folder.done()
    left = [p for p in inputs.parts if part_name(p.number) not in there]
    images = errors = 0
    if left:
        progress.begin("starting Ray")
        *_, (images, errors) = _run(job, left, progress)
    found = len(inputs.parts) - len(left)
    return Done(images, errors, len(left), found, inputs.skipped, time.monotonic() - began)


def _absolute(path: str) -> str:
    """A path means the same in every process."""
    return path if "://" in path else os.path.abspath(path)


def look(job: Job) -> dict[str, Any]:
    """What tells one model and one way to prepare images from another, after a look at both here: what is
    wrong is said before anything starts."""
    predictor = Predictor(job.model, job.threads)
    predictor.alone()
    prepared(job, predictor.fast.preprocess)
    text = predictor.fast.preprocess if job.preprocess is None else job.preprocess
    digest = hashlib.sha256(Path(job.model).read_bytes()).hexdigest()
    return {"aerogel": __version__, "model": digest, "preprocess": text}


def _run(job: Job, left: list[Part], progress: Progress) -> Iterator[tuple[int, int]]:
    """Images and errors so far, after each part."""
    with cluster(job.workers * job.threads):
        from ray import data, exceptions

        logging.getLogger("ray.data").setLevel(logging.ERROR)
        context = data.DataContext.get_current()
        context.enable_progress_bars = False
        context.actor_task_retry_on_errors = True  # a store that cannot be reached now; as often as below
        items = [{"part": json.dumps(asdict(p))} for p in left]
        with warnings.catch_warnings():  # Ray 2.60 has no other way yet to say how often to try again
            warnings.filterwarnings("ignore", "`ray_remote_args` is deprecated")
            answers = data.from_items(items, override_num_blocks=len(items)).map_batches(
                Parts,
                fn_constructor_args=(asdict(job),),
                batch_size=1,
                num_cpus=job.threads,
                compute=data.ActorPoolStrategy(size=min(job.workers, len(items))),
                max_restarts=RETRIES,
                max_task_retries=RETRIES,
            )
        total, images, errors = sum(p.count for p in left), 0, 0
        progress.begin("images", 1.0)
        began = time.monotonic()
        try:
            for row in answers.iter_rows():
                images, errors = images + int(row["images"]), errors + int(row["errors"])
                pace = images / max(time.monotonic() - began, 1e-3)
                progress.step("image", min(images + 1, total), total, f"{pace:.0f} images/s, {errors} errors")
                yield images, errors
        except exceptions.RayError as why:
            raise AerogelError(
                f"{_reason(why)}. What is finished stays: the same command goes on from there"
            ) from why


def _reason(why: BaseException) -> str:
    """The sentence below Ray's own."""
    cause = getattr(why, "cause", None) or why
    text = [line for line in str(cause).strip().splitlines() if line.strip()] or [type(cause).__name__]
    return printable(text[-1])[:300].rstrip(".")
