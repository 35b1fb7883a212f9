"""Which devices the GPU's kernels were run on: as the repository's files say, and nothing else."""

import json

import pytest
import torch

import fenchel as fl
from fenchel._attention.sparse import GPU_PATH
from fenchel._kernels.gpu import device, devices_run
from tests.needs import ROOT


def stored(root):
    """(device, file) of every result that is stored, with whether every case agreed."""
    documents = {path: json.loads(path.read_text()) for path in root.glob("results/gpu-*.json")}
    return {
        (document["device"], f"results/{path.name}"): document["parity_failures"] == 0
        for path, document in documents.items()
    }


def assert_listed(entries, root):
    """Those of `entries`, each once, are what is stored, and their kernels were right."""
    found = stored(root)
    assert sorted(entries) == sorted(found)
    assert all(found.values())


def the_entry():
    (path,) = (path for path in fl.info()["fast_paths"] if path["name"] == "GPU kernels")
    return path


def test_the_list_is_that_of_the_stored_results():
    assert_listed(devices_run.DEVICES_RUN, ROOT)


def test_a_list_that_differs_is_noticed(tmp_path):
    (tmp_path / "results").mkdir()
    entry = ("Some GPU", "results/gpu-Some-GPU.json")

    def write(failures):
        text = json.dumps({"device": entry[0], "parity_failures": failures})
        (tmp_path / entry[1]).write_text(text)

    with pytest.raises(AssertionError):  # listed, but not stored
        assert_listed((entry,), tmp_path)
    write(0)
    assert_listed((entry,), tmp_path)
    for wrong in ((), (entry, entry), (("Another", entry[1]),)):
        with pytest.raises(AssertionError):
            assert_listed(wrong, tmp_path)
    write(1)
    with pytest.raises(AssertionError):  # stored, but wrong there
        assert_listed((entry,), tmp_path)


def test_compiled_for_is_what_tests_compile():
    """Each name with its quotes or digits, in the file that has the devices."""
    text = (ROOT / "tests/kernels/gpu/compiler.py").read_text()
    for name in devices_run.COMPILED_FOR:
        written = f"_nvidia({name[3:]}," if name.startswith("sm_") else f'Device("{name}"'
        assert written in text


def test_info_and_explain_say_the_same():
    assert devices_run.checks() in the_entry()["why"]
    assert devices_run.checks() in GPU_PATH


def test_a_listed_device_is_named(monkeypatch):
    entry = ("Some GPU", "results/gpu-Some-GPU.json")
    assert "never run on Some GPU" in devices_run.run_on("Some GPU")
    monkeypatch.setattr(devices_run, "DEVICES_RUN", (entry,))
    assert devices_run.checks().endswith("; run on Some GPU")
    assert devices_run.run_on("Some GPU") == "run on Some GPU: results/gpu-Some-GPU.json"
    assert "never run on Another" in devices_run.run_on("Another")


def test_info_on_a_machine_with_devices(monkeypatch):
    """Drivers are asked for names and capabilities alone."""
    names = ["Some GPU", "Another"]
    monkeypatch.setattr(device, "is_installed", lambda: True)
    monkeypatch.setattr(device, "_against_device", lambda which: ("too old", None)[which.index])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    active, why = device.describe_gpu()
    assert active
    assert why.startswith("too old; never run on Another")
    monkeypatch.setattr(device, "_against_device", lambda which: "too old")
    assert device.describe_gpu() == (False, f"too old; {devices_run.checks()}")


def test_info_without_triton(monkeypatch):
    monkeypatch.setattr(device, "is_installed", lambda: False)
    entry = the_entry()
    assert not entry["active"]
    assert entry["why"].startswith("triton is not installed")


@pytest.mark.parametrize("page", ["attention", "benchmarks"])
def test_pages_say_never_run_as_long_as_that_is_true(page):
    text = " ".join((ROOT / "docs" / f"{page}.md").read_text().split())
    assert ("never run on a device" in text) == (not devices_run.DEVICES_RUN)
