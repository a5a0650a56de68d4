"""Weights of a run or of a published checkpoint, and a config that says how they are served."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from jaxfound.config.load import load as load_config
from jaxfound.config.load import parse
from jaxfound.config.parallel import AXES
from jaxfound.config.presets import PRESETS
from jaxfound.config.run import RunConfig
from jaxfound.data.gguf_tokenizer import gguf_tokenizer
from jaxfound.data.tokenizer import JsonTokenizer, Tokenizer, check_vocabulary, load_tokenizer
from jaxfound.models import describe, execution_of
from jaxfound.models.build import Arrays, Frame
from jaxfound.models.weights import Hub, load_weights, open_hub
from jaxfound.models.weights.folder import CONFIG
from jaxfound.models.weights.gguf import SUFFIX, read_gguf
from jaxfound.parallelism import build_mesh, make_plan
from jaxfound.parallelism.axes import BATCH_AXES
from jaxfound.resources.checkpoint import CheckpointError, CheckpointManager
from jaxfound.resources.run_directory import RunDirectory

# What a run's config says of training does not decide how it is served.
SERVED_SECTIONS = ("name", "model", "precision", "data", "serve")


@dataclass(frozen=True)
class OpenModel:
    """Weights on their devices, and what is needed to serve them.

    Attributes:
        cfg: model, precision, tokenizer, and the server's section.
        frame: the model without arrays.
        arrays: its weights, as training stores them.
        tokenizer: text to ids and back.
        start: ids before a prompt that is text.
        mesh: the devices, where they are several.
        step: training steps that the weights have seen; 0 for published ones.
    """

    cfg: RunConfig
    frame: Frame
    arrays: Arrays
    tokenizer: Tokenizer
    start: tuple[int, ...]
    mesh: Mesh | None
    step: int


def open_model(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
    tokenizer: str | None = None,
) -> OpenModel:
    """Return the weights at a path, ready to be served.

    Args:
        path: a run's folder; or a published folder or .gguf file.
        overrides: `key=value`, such as `serve.max_rows=8`, `precision.compute=bfloat16` or
            `parallel.tensor=2`; how the run was spread in training does not count.
        step: which checkpoint of a run; the newest intact one by default.
        tokenizer: in place of the one that the config or the folder names.

    Raises:
        CheckpointError: there is neither; or no checkpoint, or a damaged one.
        ConfigError, DataError, PlanError, WeightsError: what they say.
    """
    if RunDirectory(path).config.exists():
        return _open_run(RunDirectory(path), overrides, step=step, tokenizer=tokenizer)
    if path.suffix == SUFFIX or (path / CONFIG).is_file():
        return _open_published(path, overrides, tokenizer=tokenizer)
    raise _neither(path)


def planned_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the config that would be served, without weights: also of a preset or a YAML file.

    Raises:
        CheckpointError: it is nothing of all that.
        ConfigError, WeightsError: what they say.
    """
    if str(path) in PRESETS:
        return serving_config({"preset": str(path)}, overrides)
    if path.suffix in (".yaml", ".yml"):
        return _config_of_run(path, overrides)
    if RunDirectory(path).config.exists():
        return _config_of_run(RunDirectory(path).config, overrides)
    if path.suffix == SUFFIX or (path / CONFIG).is_file():
        return serving_config(published_config(open_hub(path)), overrides)
    raise _neither(path)


def _neither(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is neither a run (it has no {RunDirectory(path).config.name}) nor a published "
        f"checkpoint ({CONFIG} and safetensors, or a {SUFFIX} file). Give the folder that "
        "`jaxfound train` or `jaxfound convert` named"
    )


def _config_of_run(file: Path, overrides: Sequence[str]) -> RunConfig:
    own = load_config(file).model_dump(mode="json")
    return serving_config({name: own[name] for name in SERVED_SECTIONS}, overrides)


def _open_run(
    there: RunDirectory, overrides: Sequence[str], *, step: int | None, tokenizer: str | None
) -> OpenModel:
    cfg = _config_of_run(there.config, overrides)
    words = load_tokenizer(tokenizer or cfg.data.tokenizer)
    check_vocabulary(words, vocab_size=cfg.model.vocab_size)
    frame, mesh = _frame(cfg)
    one = SingleDeviceSharding(jax.local_devices()[0])
    shapes = frame.shapes()._asdict()
    places = (
        jax.tree.map(lambda _: one, shapes) if mesh is None else frame.shardings(mesh)._asdict()
    )
    like = jax.tree.map(
        lambda shape, place: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place),
        shapes,
        places,
    )
    with CheckpointManager(there.checkpoints, keep=0) as checkpoints:
        found = checkpoints.restore_weights(step, like=like)
    arrays = Arrays(**cast(dict, found.state))
    # Step 0 was not trained here: its prompts begin as where it was published.
    start = prompt_start(words, published=found.step == 0)
    return OpenModel(cfg, frame, arrays, words, start, mesh, found.step)


def _open_published(path: Path, overrides: Sequence[str], *, tokenizer: str | None) -> OpenModel:
    hub = open_hub(path)
    cfg = serving_config(published_config(hub), overrides)
    words = _published_tokenizer(path, tokenizer)
    check_vocabulary(words, vocab_size=cfg.model.vocab_size)
    frame, mesh = _frame(cfg)
    arrays = load_weights(hub, mesh=mesh, rules=frame.execution.rules)
    return OpenModel(cfg, frame, arrays, words, prompt_start(words, published=True), mesh, 0)


def _published_tokenizer(path: Path, tokenizer: str | None) -> Tokenizer:
    if tokenizer is None and path.suffix == SUFFIX:
        return gguf_tokenizer(read_gguf(path).metadata, place=str(path))
    return load_tokenizer(tokenizer or str(path))


def published_config(hub: Hub) -> dict[str, object]:
    """Return what a published checkpoint says of itself, as sections of a config."""
    compute = "float32" if hub.config.dtype == "float32" else "bfloat16"
    return {"model": hub.model.model_dump(mode="json"), "precision": {"compute": compute}}


def serving_config(sections: dict[str, object], overrides: Sequence[str]) -> RunConfig:
    """Return the config of a server: sections of a run, and what the command line changes.

    Raises:
        ConfigError: as `load` does.
    """
    return parse(
        {**sections, "train": {"steps": 1, "batch_size": 1, "seq_len": 2}},
        overrides,
        place="the served model's config",
    )


def prompt_start(tokenizer: Tokenizer, *, published: bool) -> tuple[int, ...]:
    """Return the ids before a prompt that is text: bos began every document in our training."""
    if published and isinstance(tokenizer, JsonTokenizer):
        return tokenizer.prompt_start
    return (tokenizer.bos_id,)


def _frame(cfg: RunConfig) -> tuple[Frame, Mesh | None]:
    """Return the model without arrays, and the mesh if several devices were asked for."""
    data = 1 if cfg.parallel.data == "auto" else cfg.parallel.data
    degrees = {axis: data if axis == "data" else getattr(cfg.parallel, axis) for axis in AXES}
    num_devices = math.prod(degrees.values())
    # What a plan knows as the rows of a batch are rows of a step, which are padded to divide.
    rows = math.prod(degrees[axis] for axis in BATCH_AXES)
    served = cfg.model_copy(update={"train": cfg.train.model_copy(update={"batch_size": rows})})
    plan = make_plan(served, num_devices, params=describe(cfg.model))
    execution = execution_of(plan, cfg.precision)
    # Others stay free: for another server, say.
    mesh = None if num_devices == 1 else build_mesh(plan, devices=jax.devices()[:num_devices])
    return Frame(cfg.model, execution=execution), mesh
