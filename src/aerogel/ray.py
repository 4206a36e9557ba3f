"""aerogel on Ray: `Predict` for Ray Data, `app` for Ray Serve. Needs `pip install "aerogel[ray]"`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aerogel.errors import InvalidArgument
from aerogel.ir import Array
from aerogel.preprocess import Recipe
from aerogel.serving.cluster import check_ray, cpus
from aerogel.serving.predictor import Predictor

__all__ = ["Predict", "app"]


class Predict:
    """A saved model as `map_batches` of Ray Data calls it: columns of inputs go, columns of outputs come.

    Give the file's path, which every node can read: each actor maps it, and those of one machine share its
    pages. Threads are the actor's `num_cpus`. Set finite `max_restarts` and `max_task_retries`: Ray's own
    have no end.

    Example:
        >>> images = ray.data.read_images("photos/", include_paths=True)  # doctest: +SKIP
        >>> answers = images.map_batches(  # doctest: +SKIP
        ...     Predict,
        ...     fn_constructor_args=("model.aero",),
        ...     batch_size=32,
        ...     num_cpus=1,
        ...     compute=ray.data.ActorPoolStrategy(size=2),
        ...     max_restarts=3,
        ...     max_task_retries=3,
        ... )

    Args:
        path: The .aero file.
        column: The column of a model's only input; by default one with the input's name, or `image`.
        preprocess: A recipe for a column of uint8 images, height x width x channels, such as "resize=256
            crop=224"; by default the one saved with the model. Other element types are taken as they are.
        threads: By default the CPUs that Ray gave the actor.
    """

    def __init__(
        self,
        path: str,
        *,
        column: str | None = None,
        preprocess: str | None = None,
        threads: int | None = None,
    ) -> None:
        self._predictor = Predictor(path, threads or cpus())
        self._recipe = self._predictor.recipe if preprocess is None else Recipe.parse(preprocess)
        self._column = column
        if column is not None:
            self._predictor.alone()

    def __call__(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """All other columns, and one for each output."""
        names = self._columns(batch)
        found = self._predictor({name: self._input(batch[own]) for name, own in names.items()})
        rest = {name: value for name, value in batch.items() if name not in names.values()}
        return {**rest, **found}

    def _columns(self, batch: Mapping[str, Array]) -> dict[str, str]:
        """For each input the column it comes from."""
        inputs = list(self._predictor.inputs)
        if len(inputs) == 1:
            asked = (inputs[0], "image") if self._column is None else (self._column,)
            own = [name for name in asked if name in batch]
            if own:
                return {inputs[0]: own[0]}
        elif all(name in batch for name in inputs):
            return {name: name for name in inputs}
        wanted = self._column or " and ".join(inputs)
        raise InvalidArgument(f"no column '{wanted}' among {sorted(batch)}: say Predict(path, column=...)")

    def _input(self, held: Any) -> Array:
        """A column as one array: images through the recipe, rows that are arrays put together."""
        if self._recipe is not None and np.asarray(held[0]).dtype == np.uint8:
            return np.stack([self._recipe.applied(np.asarray(row)) for row in held])
        return np.stack(list(held)) if held.dtype == object else np.asarray(held)


def app(args: dict[str, Any]) -> Any:
    """A Ray Serve application of a saved model, as a config's `import_path: aerogel.ray:app` names it.

    `aerogel serve MODEL -o serve.yaml` writes such a config.

    Example:
        >>> serve.run(app({"model": "model.aero", "threads": 2, "replicas": 2}))  # doctest: +SKIP

    Args:
        args: `model`, the path of the .aero file; and if you like `preprocess` (a recipe), `batch` (requests
            that run together, at most), `wait_ms` (for others to come), `max_bytes` (of a body), `threads`,
            `replicas` and, to scale by load, `most_replicas`.
    """
    check_ray()
    from aerogel.serving.deployment import application

    return application(args)
