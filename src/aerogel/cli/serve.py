"""The verb `serve`."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from aerogel.cli.batch import Bgr, Crop, Mean, Sides, Std, recipe
from aerogel.cli.options import check_result
from aerogel.cli.words import in_words
from aerogel.errors import printable


def serve(
    model: Annotated[str, typer.Argument(help="The .aero file.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    threads: Annotated[int, typer.Option(min=1, help="Threads, and CPUs, of each replica.")] = 1,
    replicas: Annotated[str, typer.Option(help="How many, or MIN:MAX to scale by load.")] = "1",
    images: Annotated[
        int | None,
        typer.Option("--batch", min=1, help="Requests that run together, at most; by default as tuned."),
    ] = None,
    wait_ms: Annotated[float, typer.Option(min=0, help="How long a request waits for others.")] = 2.0,
    max_bytes: Annotated[int, typer.Option(min=1, help="Of a request's body.")] = 16 << 20,
    resize: Sides = None,
    crop: Crop = None,
    mean: Mean = None,
    std: Std = None,
    bgr: Bgr = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write Ray Serve's config there, and run nothing.")
    ] = None,
) -> None:
    """Answer HTTP requests with a model, by Ray Serve.

    POST / takes .npy arrays, JSON ({"inputs": [...]}) and images; GET /ready computes an answer before it
    says so. SIGTERM or Ctrl-C: requests that are running are answered first. There is no encryption and no
    password: put a gateway before it. With -o it writes the config for `serve deploy` and KubeRay.

    Example:  aerogel serve model.aero --replicas 2 --port 8000
    """
    if not re.fullmatch(r"[1-9][0-9]{0,3}(:[1-9][0-9]{0,3})?", replicas):
        raise typer.BadParameter(f"--replicas is a number, or MIN:MAX, not '{printable(replicas)}'")
    least, _, most = replicas.partition(":")
    with in_words():
        from aerogel.serving.cluster import check_ray, cluster
        from aerogel.serving.predictor import Predictor

        how = recipe(resize, crop, mean, std, bgr, None)
        if out is not None:
            check_result(out, (".yaml", ".yml"), [model])
        check_ray()
        Predictor(model, threads)  # what is wrong with it is said here
        args: dict[str, Any] = {"model": os.path.abspath(model), "threads": threads, "replicas": int(least)}
        args |= {"most_replicas": int(most)} if most else {}
        args |= {"batch": images} if images else {}
        args |= {"preprocess": how} if how else {}
        args |= {"wait_ms": wait_ms, "max_bytes": max_bytes}
        if out is not None:
            from aerogel.serving.running import written

            written(args, host, port, out)
            typer.echo(printable(f"{out}: serve deploy takes it, and a RayService's serveConfigV2"))
            return
        with cluster(threads * int(least)):
            from aerogel.serving.running import running

            stopped = threading.Event()
            with running(args, host, port):
                for name in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(name, lambda *_: stopped.set())
                typer.echo(printable(f"ready: http://{host}:{port}/"))
                stopped.wait()
                typer.echo("answering what is left")
