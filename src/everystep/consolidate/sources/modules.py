"""Which of a saved state's tensors are a module's, and what the module itself calls them.

Theory of operation. What DCP's planner flattened, it tells the way to (``("app", "model", "layers.0.weight")``): a module's state dict is
a mapping whose keys are the module's own names, so that all but the last step of the way is the module's place in the state, and the last
step is the name. Places in optimizers, schedulers and the like are told by their words. Where nobody told the ways, the names themselves
are cut: first what surely surrounds a model, then one word that stands for the model, if all names begin with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from everystep.errors import ConfigError, LayoutError, NotFoundError

_OTHERS = re.compile(
    r"(?:.*_)?(?:optims?|optimizers?|opt|optimizer_states?|optim_states?|(?:lr_)?schedulers?|data_?loaders?|rng|rng_states?|scaler|grad_scaler|"
    r"loss_scaler|train_state|trainer_state|callbacks|loops)(?:_?\d+)?"
)
"""Words for what is no module in a saved state."""
_AROUND = ("app", "app_state", "state_dict", "state", "checkpoint", "client_state")
MODEL = ("model", "module", "models", "net", "network", "model_state_dict", "_forward_module", "state_dict")
"""Words that stand for a model."""
_WRAPPERS = frozenset(["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])

Place = tuple[str, ...]


def module_names(
    shapes: Mapping[str, tuple[int, ...]], paths: Mapping[str, Sequence[str | int]], group: str | None, *, where: str, unwrap: bool = False
) -> dict[str, str]:
    """Stored name -> the module's own, of the one module that is meant.

    Args:
        shapes: All stored tensors.
        paths: The way to each in the saved state, where it is told.
        group: The module's place (``"model"``, ``"app.model"``, or the first word of it); None: the only one.
        where: The folder, for messages.
        unwrap: The module is one that trains another one inside it (Lightning): take the prefix off that all its names share.

    Raises:
        ConfigError: There are several modules, or none in ``group``; lists them.
        NotFoundError: There are no tensors of a module at all.
        LayoutError: Two tensors would have one name.
    """
    told = {name: tuple(map(str, paths[name])) for name in shapes if paths.get(name)}
    chosen = _by_place(shapes, told, group, where) if len(told) == len(shapes) else _by_name(shapes, group, where)
    if not chosen:
        raise NotFoundError(
            f"{where!r} holds no tensors of a module", key=where, kind="no-model", hint="name the folder with the model's weights"
        )
    own = _cleaned(_without_word(chosen, MODEL) if unwrap else chosen)
    first: dict[str, str] = {}
    for name in own:
        if first.setdefault(own[name], name) != name:
            raise LayoutError(f"{first[own[name]]!r} and {name!r} of {where!r} would both be called {own[name]!r}", key=name, kind="names",
                              hint="say with group=... which of the modules is meant")  # fmt: skip
    return own


def _is_other(word: str) -> bool:
    return _OTHERS.fullmatch(word) is not None


def _by_place(shapes: Mapping[str, tuple[int, ...]], told: Mapping[str, Place], group: str | None, where: str) -> dict[str, str]:
    places: dict[Place, list[str]] = {}
    for name, way in told.items():
        # Some flatten their optimizers themselves: ("optimizer.state.0.exp_avg",).
        if not any(_is_other(word) for word in (*way[:-1], way[-1].partition(".")[0])):
            places.setdefault(way[:-1], []).append(name)
    root = _asked(places, group, where) if group is not None else _only(places, shapes, where)
    return {name: ".".join(told[name][len(root) :]) for place, names in places.items() if place[: len(root)] == root for name in names}


def _asked(places: Iterable[Place], group: str, where: str) -> Place:
    """The place that is called so, or the only one whose first or last word it is."""
    known = list(places)
    for cut in {place[:at] for place in known for at in range(len(place) + 1)}:
        if ".".join(cut) == group:
            inner = {place for place in known if place[: len(cut)] == cut}
            return next(iter(inner)) if len(inner) == 1 else cut
    raise _several(known, where, f"{where!r} has no module {group!r}")


def _only(places: Mapping[Place, Sequence[str]], shapes: Mapping[str, tuple[int, ...]], where: str) -> Place:
    # Step counters and the like are no modules.
    known = [place for place, names in places.items() if any(shapes[name] for name in names)] or list(places)
    roots = {next((place[: at + 1] for at, word in enumerate(place) if word in MODEL), None) for place in known} - {None}
    if len(known) == 1:
        return known[0]
    if len(roots) == 1:
        return roots.pop() or ()
    if not known:
        return ()
    raise _several(known, where, f"{where!r} has several modules")


def _several(places: Iterable[Place], where: str, what: str) -> ConfigError:
    names = sorted({".".join(place) or "(top level)" for place in places})
    return ConfigError(f"{what}: there are {', '.join(map(repr, names[:10]))}", key=where, kind="group", hint="say which with group=...")


def _by_name(shapes: Mapping[str, tuple[int, ...]], group: str | None, where: str) -> dict[str, str]:
    """Nobody told the ways: cut the names."""
    names = [name for name in shapes if not any(_is_other(word) for word in name.split(".")[:2])]
    if group is not None:
        under = {name: name[len(group) + 1 :] for name in names if name.startswith(group + ".")}
        if not under:
            raise _several([(name.partition(".")[0],) for name in names], where, f"{where!r} has no module {group!r}")
        return under
    bare = {name: name for name in names}
    before: dict[str, str] = {}
    while before != bare:
        before, bare = bare, _without_word(bare, _AROUND)
    return _without_word(bare, MODEL)


def _without_word(names: Mapping[str, str], words: Sequence[str]) -> dict[str, str]:
    """Without the first word of all names, if it is the same and one of ``words``."""
    firsts = {own.partition(".")[0] for own in names.values()}
    if len(firsts) == 1 and firsts <= set(words) and all("." in own for own in names.values()):
        return {name: own.partition(".")[2] for name, own in names.items()}
    return dict(names)


def _cleaned(names: Mapping[str, str]) -> dict[str, str]:
    """Without what compiling and wrapping put into names."""
    clean = {name: ".".join(word for word in own.split(".") if word not in _WRAPPERS) for name, own in names.items()}
    return clean if len(set(clean.values())) == len(clean) and all(clean.values()) else dict(names)
