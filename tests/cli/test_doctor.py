"""doctor: the probe's parts against file systems whose answers are known, and limits read from trees laid out here."""

from __future__ import annotations

import errno
import os

import pytest

from everystep import errors
from everystep.cli import doctor, probe, surroundings


def test_doctor_tests_cleans_up_and_decides(everystep, tmp_path):
    """Doctor --json has the file system, speeds, limits, survival and choices, and leaves nothing behind."""
    found = everystep("doctor", tmp_path, "--max-mib", "16", "--json").json
    assert os.listdir(tmp_path) == []
    disk = found["disk"]
    assert disk["file_system"] == probe.file_system(tmp_path)[0]
    assert disk["buffered_write"] > 0
    assert (disk["direct_alignment"] is None) == (disk["direct_write"] is None)
    assert (disk["link"], disk["rename"], disk["mkdir"]) == ("", "", "")
    assert disk["tested_nbytes"] <= 16 << 20
    assert found["memory"]["room_nbytes"] > 0
    assert found["memory"]["limits"][0]["source"] == "machine"
    assert found["survival"][0]["survives"] is True
    assert found["survival"][-1]["survives"] is False
    assert set(found["choices"]) == {"write", "publish a manifest", "keep in memory", "reach the disk"}


def test_doctor_as_text_names_what_it_found(everystep, tmp_path):
    """The tables name the file system, each test, and what everystep will do."""
    text = everystep("doctor", tmp_path, "--max-mib", "16").stdout
    for word in (
        "file system",
        "O_DIRECT",
        "fsync",
        "hard link",
        "exclusive mkdir",
        "reflink",
        "machine",
        "everystep will",
        "survives",
        "is lost",
    ):
        assert word in text


def test_doctor_of_a_run_to_be_tests_the_nearest_folder(everystep, tmp_path):
    """For a path that is not there yet the existing folder above it is tested, and the path is not made."""
    found = everystep("doctor", tmp_path / "runs" / "gpt", "--max-mib", "16", "--json").json
    assert found["disk"]["path"] == str(tmp_path)
    assert os.listdir(tmp_path) == []


def test_doctor_of_a_file_and_of_a_url_is_a_usage_error(everystep, tmp_path):
    """What is no directory cannot be tested."""
    (tmp_path / "file").write_text("x")
    assert everystep("doctor", tmp_path / "file").code == 2
    assert everystep("doctor", "s3://bucket").code == 2


def test_doctor_of_an_unwritable_folder(everystep, tmp_path, monkeypatch):
    """A folder that cannot be written in is the store's exit code, in one line."""

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(probe.tempfile, "mkdtemp", refuse)
    answer = everystep("doctor", tmp_path)
    assert answer.code == 13
    assert "Permission denied" in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


def test_probe_of_a_disk_that_fails_half_way_cleans_up(tmp_path, monkeypatch):
    """An I/O error in the middle becomes a StoreError with its number, and the test's files are gone."""

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(probe.os, "fsync", fail)
    with pytest.raises(errors.StoreError) as caught:
        probe.probe(tmp_path, max_nbytes=16 << 20)
    assert caught.value.errno == errno.EIO
    assert os.listdir(tmp_path) == []


def test_probe_where_direct_writes_are_refused(tmp_path, monkeypatch):
    """F46: without O_DIRECT the probe says so and still measures the buffered way; the choice follows."""
    real = os.open

    def refuse_direct(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(probe.os, "open", refuse_direct)
    found = probe.probe(tmp_path, max_nbytes=16 << 20)
    assert (found.direct_alignment, found.direct_write, found.direct_read) == (None, None, None)
    assert found.buffered_write > 0
    assert "page cache" in doctor.choices(found, doctor.memory_room())["write"]


def test_probe_without_hard_links_chooses_another_way(tmp_path, monkeypatch):
    """A mount without hard links is told from one that overwrites."""

    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(probe.os, "link", refuse)
    found = probe.probe(tmp_path, max_nbytes=16 << 20)
    assert "not supported" in found.link
    assert "no hard links" in doctor.choices(found, doctor.memory_room())["publish a manifest"]
    assert any("link" in text for text in doctor.warnings(found, []))


def lay(root, files):
    """Write ``{path: text}`` below a folder."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


MEMINFO = "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 600 kB\n"


def test_limits_of_cgroup_v2_count_every_ancestor(tmp_path):
    """Version 2: the group's own limit and those above it are all found; "max" is none."""
    lay(tmp_path, {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": "5000\n", "sys/fs/cgroup/a/memory.current": "4000\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/b/memory.current": "10\n",
    })  # fmt: skip
    found = surroundings.memory_limits(tmp_path)
    assert [(limit.limit_nbytes, limit.free_nbytes) for limit in found] == [(1000 << 10, 600 << 10), (5000, 1000)]


def test_limits_of_cgroup_v1_ignore_the_number_that_means_none(tmp_path):
    """Version 1: memory's own hierarchy is read, and the huge default counts as no limit."""
    lay(tmp_path, {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "5:memory:/job\n4:cpu,cpuacct:/other\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n", "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "300\n", "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "400\n",
    })  # fmt: skip
    found = surroundings.memory_limits(tmp_path)
    assert [(limit.limit_nbytes, limit.free_nbytes) for limit in found] == [(1000 << 10, 600 << 10), (300, 0)]


def test_limits_inside_a_container_are_read_at_the_root(tmp_path):
    """A container sees its own group at the mount's root although /proc names another path."""
    lay(tmp_path, {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/docker/abc\n",
        "sys/fs/cgroup/memory.max": "700\n", "sys/fs/cgroup/memory.current": "200\n",
    })  # fmt: skip
    assert [limit.free_nbytes for limit in surroundings.memory_limits(tmp_path)] == [600 << 10, 500]


@pytest.mark.parametrize(
    ("environ", "files", "expected", "lost"),
    [
        ({}, {"proc/self/cgroup": "0::/\n"}, {}, set()),
        ({"KUBERNETES_SERVICE_HOST": "x"}, {}, {"container": "kubernetes pod"}, {"container"}),
        ({}, {".dockerenv": ""}, {"container": "docker"}, {"container"}),
        ({}, {"run/.containerenv": ""}, {"container": "podman"}, {"container"}),
        (
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"},
            {"proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_7\n"},
            {"slurm": "job 7, step 0"},
            {"Slurm"},
        ),
        ({}, {"proc/self/cgroup": "0::/system.slice/train.service\n"}, {"unit": "train.service"}, {"train.service"}),
        ({}, {"proc/self/cgroup": "0::/user.slice/user-1.slice/session-3.scope\n"}, {"unit": "session-3.scope"}, {"login session"}),
    ],
)
def test_context_and_what_an_agent_survives_in_it(tmp_path, environ, files, expected, lost):
    """Each context is recognised by what gives it away, and has a row that says what ends an agent there."""
    lay(tmp_path, files)
    found = surroundings.context(environ, tmp_path)
    assert found == expected
    rows = surroundings.survival(found)
    assert [row.survives for row in rows] == [True] + [False] * (len(rows) - 1)
    for word in lost:
        assert any(word in row.event for row in rows[1:-2])
    assert len(rows) == 3 + len(lost)
