"""kill -9 of a process that consolidates, at random moments, then again: nothing wrong ever has a final name, and it finishes.

Also a program: python test_consolidate_kill.py FIRST SECOND ROOT ROUNDS SEED SETTINGS. Lives are forked from that process, which has no threads.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROUNDS = int(os.environ.get("EVERYSTEP_SOAK_ROUNDS", "8"))
KILLS = 4
POINTERS = ("LATEST", "BEST", "history.json")


def life(source: str, step: str, root: Path, settings: dict, *, kill_after_s: float | None = None) -> int:
    """One process that consolidates; its exit status, or -9 when it was killed."""
    from everystep.consolidate import job
    from everystep.consolidate.source import open_source
    from everystep.schedule import Consolidate

    child = os.fork()
    if child == 0:
        try:
            job.run(open_source(source, step=step), Consolidate(into=str(root), **settings), reason="every")
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    ended = os.pidfd_open(child)
    if not select.select([ended], [], [], kill_after_s)[0]:
        signal.pidfd_send_signal(ended, signal.SIGKILL)
    os.close(ended)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def content(folder: Path) -> dict[str, bytes]:
    """All files of an export but those that say when it was made."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in {"README.md", "everystep.json"}}


def wrong(root: Path, wanted: dict[str, dict[str, bytes]]) -> list[str]:
    """What is wrong with what is to be seen: exports that are not whole, a LATEST that leads nowhere, bad files under final names."""
    found = []
    for path in root.iterdir():
        if path.name in POINTERS or path.name.startswith("."):
            if path.name.endswith(".partial"):
                [same] = [files for name, files in wanted.items() if path.name.startswith(f".{name}-")]
                found += [
                    f"{path.name}/{file.name} is not whole" for file in path.iterdir()
                    if file.name in same and file.suffix == ".safetensors" and file.read_bytes() != same[file.name]
                ]  # fmt: skip
            continue
        if content(path) != wanted.get(path.name):
            found.append(f"{path.name} is not as it should be")
        if not {"README.md", "everystep.json"} <= set(os.listdir(path)):
            found.append(f"{path.name} lacks its record or card")
        json.loads((path / "everystep.json").read_bytes())
    latest = root / "LATEST"
    if not latest.is_symlink() or not (latest / "everystep.json").is_file():
        found.append("LATEST leads nowhere")
    if (root / "history.json").exists():
        json.loads((root / "history.json").read_bytes())
    return found


def campaign(first: str, second: str, root: Path, rounds: int, seed: int, settings: dict) -> dict:
    """Rounds of kills; what was violated, and how often a life was killed before and after it had published."""
    chance = random.Random(seed)
    sources = [first.rpartition("@")[::2], second.rpartition("@")[::2]]
    reference = root / "reference"
    failed = life(*sources[0], reference, settings)
    began = time.monotonic()
    if failed or life(*sources[1], reference, settings):
        return {"violations": ["the reference failed"]}
    whole_s = time.monotonic() - began
    wanted = {path.name: content(path) for path in reference.iterdir() if path.name.startswith("model-")}
    assert len(wanted) == 2
    violations, killed, published = [], 0, 0
    for number in range(rounds):
        place = root / f"round-{number}"
        if life(*sources[0], place, settings):
            violations.append(f"round {number}: the first failed")
        for _ in range(KILLS):
            code = life(*sources[1], place, settings, kill_after_s=chance.uniform(0, whole_s))
            killed += code == -signal.SIGKILL
            if code not in (0, -signal.SIGKILL):
                violations.append(f"round {number}: exit {code}")
            violations += [f"round {number}: {what}" for what in wrong(place, wanted)]
            published += len([path for path in place.iterdir() if path.name.startswith("model-")]) == 2
            if code == 0:
                break
        if life(*sources[1], place, settings):
            violations.append(f"round {number}: it did not finish")
        violations += [f"round {number}, at its end: {what}" for what in wrong(place, wanted)]
        left = {path.name for path in place.iterdir()} - {"LATEST", "history.json", ".lock", ".history.lock", *wanted}
        if any(not name.startswith(".tmp-") for name in left):
            violations.append(f"round {number}: {sorted(left)} is left")
        if len(json.loads((place / "history.json").read_bytes())) != 2:
            violations.append(f"round {number}: the history has not two rows")
        subprocess.run(["rm", "-rf", str(place)], check=True)
    return {"violations": violations, "killed": killed, "published": published, "rounds": rounds, "whole_s": whole_s}


def run_campaign(tmp_path: Path, first: str, second: str, settings: dict) -> dict:
    (tmp_path / "exports").mkdir()
    command = [sys.executable, __file__, first, second, str(tmp_path / "exports"), str(ROUNDS), "7", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert done.stdout, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["violations"] == [], (result, done.stderr[-2000:])
    assert result["killed"] > result["rounds"] // 2
    return result


@pytest.mark.timeout(600)
def test_streamed(tmp_path: Path) -> None:
    """F58: an export that is put together anew: killed at any point and started again it is whole, and the one before it always was."""
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(5)
    for step in (1, 2):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        shards = {
            f"model-0000{at}-of-00003.safetensors": {f"w{at}.{i}": rng.standard_normal((256, 1024), np.float32) for i in range(3)}
            for at in (1, 2, 3)
        }
        for name, tensors in shards.items():
            save_file(tensors, folder / name, {"format": "pt"})
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        (folder / "config.json").write_text('{"model_type": "gpt2"}')
    paths = [f"{tmp_path}/out/checkpoint-{step}@latest" for step in (1, 2)]
    run_campaign(tmp_path, *paths, {"max_shard_size": "2MiB"})


@pytest.mark.timeout(600)
def test_linked(tmp_path: Path) -> None:
    """F58: an export whose files are the checkpoint's own, likewise; a run that is over is enough for it."""
    import torch

    import everystep

    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    with everystep.Checkpointer(tmp_path / "run", agent=False) as ckpt:
        for step in (1, 2):
            with torch.no_grad():
                model[0].bias += 1
            ckpt.save(step, {"model": model}).wait("disk")
    run_campaign(tmp_path, f"{tmp_path}/run@1", f"{tmp_path}/run@2", {})


if __name__ == "__main__":
    print(
        json.dumps(campaign(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), json.loads(sys.argv[6]))),
        flush=True,
    )
