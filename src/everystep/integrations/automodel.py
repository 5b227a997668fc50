"""Everystep beside NeMo AutoModel: whole models from its checkpoints by a ``consolidate:`` block of the job's YAML, off the training path.

    recipe: everystep.integrations.automodel.TrainFinetuneRecipeForNextTokenPrediction
    consolidate:
      when: [{every: 500}, {improves: val_loss}]

Every recipe of NeMo's is here under its own name: a subclass made when it is asked for, which is also when NeMo is imported. It does what
NeMo's does, and tells a ``Consolidations`` when NeMo has published a checkpoint. ``consolidate_checkpoints`` makes one for any other loop.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from everystep.integrations.consolidations import Consolidations, consolidate_checkpoints, is_first_rank, settled
from everystep.schedule import Consolidate

__all__ = ["Consolidations", "consolidate_checkpoints", "consolidating"]

_log = logging.getLogger("everystep.consolidate")


def consolidating(recipe: type[Any]) -> type[Any]:
    """A subclass of a NeMo recipe that reads ``consolidate:`` and consolidates what the recipe saves.

    Without the block it does what the recipe does. With it, and unless the YAML says otherwise, NeMo's own consolidation (``final`` by
    default) is off. A word in the block that is not known is a ConfigError of the constructor, on every rank.
    """

    def __init__(self: Any, cfg: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # of the class below
        block = cfg.get("consolidate", None)
        options = None if block is None else settled(block)
        if options is not None:
            _turn_off(cfg)
        recipe.__init__(self, cfg, *args, **kwargs)
        self.consolidate_options = options
        self.consolidations = None

    def save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = recipe.save_checkpoint(self, *args, **kwargs)
        _opened(self)()
        return result

    def run_train_validation_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = recipe.run_train_validation_loop(self, *args, **kwargs)
        except BaseException:
            if self.consolidations is not None:  # what is due is started; the run is not over, so `final` is not due
                self.consolidations.close(ended=False, wait=False)
            raise
        # After SIGTERM there is little time: the process goes on as long as the system lets it.
        preempted = bool(getattr(getattr(self, "step_scheduler", None), "sigterm_flag", False))
        _opened(self).close(ended=True, wait=False if preempted else None)
        return result

    methods = (__init__, save_checkpoint, run_train_validation_loop)
    about = {"__module__": __name__, "__doc__": f"NeMo AutoModel's {recipe.__name__}, with a ``consolidate:`` block in its YAML."}
    return type(recipe.__name__, (recipe,), {**about, **{method.__name__: method for method in methods}})


def _turn_off(cfg: Any) -> None:
    """Leave consolidation to us, unless the YAML says that NeMo shall do it too."""
    mode = cfg.get("checkpoint.save_consolidated", None)
    if mode is None:
        cfg.set_by_dotted("checkpoint.save_consolidated", False)
    elif str(mode).lower() != "false":
        _log.warning("checkpoint.save_consolidated=%s: NeMo consolidates too, while training waits; set it to false", mode)


def _opened(recipe: Any) -> Consolidations:
    """The recipe's consolidations, made when the first is asked for: only then it has a checkpointer."""
    if recipe.consolidations is None:
        checkpointer = getattr(recipe, "checkpointer", None)
        options, config = recipe.consolidate_options, getattr(checkpointer, "config", None)
        active = options is not None and config is not None and bool(getattr(config, "enabled", True))
        root = os.fspath(config.checkpoint_dir) if active and config is not None else "."
        if active and "://" in root:
            _log.warning("nothing is consolidated: checkpoint_dir %s is no folder", root)
            active = False
        active = active and is_first_rank(getattr(checkpointer, "process_group", None))
        recipe.consolidations = Consolidations(root, options or Consolidate(when="never"), active=active)
    opened: Consolidations = recipe.consolidations
    return opened


def __getattr__(name: str) -> Any:
    """NeMo's recipe of that name, consolidating."""
    if "Recipe" not in name or name.startswith("_"):  # never NeMo's import for what some tool looks for in every module
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        recipes = importlib.import_module("nemo_automodel.cli.utils")  # by name: it is optional, and has no types
    except ImportError as error:
        raise ImportError(f"{__name__}.{name} needs NeMo AutoModel: pip install nemo-automodel") from error
    try:
        module, _, known = recipes.resolve_recipe_name(name).rpartition(".")
    except ValueError as error:
        raise AttributeError(f"NeMo AutoModel has no recipe {name!r}; {error}") from error
    made = consolidating(getattr(importlib.import_module(module), known))
    globals()[name] = made
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Run the recipe that a YAML names: what ``automodel`` starts with torchrun when there are several GPUs (``-c FILE`` and overrides)."""
    parser = importlib.import_module("nemo_automodel.components.config._arg_parser")
    cfg = parser.parse_args_and_load_config(argv=None if argv is None else list(argv))
    named = cfg.get("recipe", None)
    made = named if isinstance(named, str) else named.get("_target_", None)
    if isinstance(made, str):
        made = getattr(importlib.import_module("everystep.integrations.automodel"), made.rpartition(".")[2])
    recipe = made(cfg)
    recipe.setup()
    recipe.run_train_validation_loop()


if __name__ == "__main__":
    # As a script this folder comes first on the path, and its modules bear the names of the libraries that they are for.
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != os.path.dirname(os.path.abspath(__file__))]
    main()
