"""``trine run``: the script cannot tell, nor can who started it. Its output, code and signals are python's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import trine

SECONDS = 120


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def without_our_line(text: str) -> str:
    return "".join(line for line in text.splitlines(True) if not line.startswith("trine: "))


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


#: What a script may do that its caller sees. None of them imports torch, so each is quick.
SCRIPTS = {
    "arguments": "import sys\nprint(sys.argv, __name__, __file__, __package__, __spec__, sys.path[0])",
    "exit code": "import sys\nsys.exit(7)",
    "exit message": "import sys\nsys.exit('goodbye')",
    "exit none": "import sys\nprint('x')\nsys.exit()",
    "exception": "def inner():\n    return 1 / 0\n\n\ndef outer():\n    inner()\n\n\nouter()",
    "chained": "try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('b') from error",
    "context": "try:\n    {}['a']\nexcept KeyError:\n    raise ValueError('b')",
    "syntax error": "print('before')\nx = = 1",
    "hook": "import sys\nsys.excepthook = lambda kind, error, trace: print('mine', kind.__name__)\n1 / 0",
    "at exit": "import atexit\natexit.register(print, 'last')\nraise RuntimeError('first')",
    "interrupt": "import atexit\natexit.register(print, 'last')\nraise KeyboardInterrupt",
    "terminate": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "kill": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "future": "from __future__ import annotations\ndef f(x: Nowhere) -> None: ...\nprint(f.__annotations__)",
    "pickle": (
        "import pickle\n\n\nclass Thing:\n    pass\n\n\n"
        "print(type(pickle.loads(pickle.dumps(Thing()))) is Thing, Thing.__module__)"
    ),
    "neighbour": "import neighbour\nprint(neighbour.VALUE)",
    "spawn": (
        "import multiprocessing\n\n\ndef work(x):\n    print(__name__, x, flush=True)\n\n\n"
        "if __name__ == '__main__':\n    p = multiprocessing.get_context('spawn').Process(target=work, args=(3,))\n"
        "    p.start()\n    p.join()\n    print(p.exitcode)"
    ),
    "input": "print(input())",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_as_under_python(tmp_path: Path, name: str) -> None:
    write(tmp_path, "script.py", SCRIPTS[name])
    write(tmp_path, "neighbour.py", "VALUE = 5")

    def outcome(*command: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, *command, "script.py", "--rate", "1", "-o", "x"],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            input="typed\n",
            timeout=SECONDS,
            check=False,
        )
        return done.returncode, done.stdout, without_our_line(done.stderr)

    assert outcome("-m", "trine", "run") == outcome()


def test_a_module_is_run_as_under_python(tmp_path: Path) -> None:
    code = "import sys\nfrom . import other\nprint(__name__, __package__, __spec__.name, other.VALUE, sys.argv[1:])\n1 / 0\n"
    write(tmp_path, "package/__init__.py", "")
    write(tmp_path, "package/other.py", "VALUE = 5")
    write(tmp_path, "package/train.py", code)
    write(tmp_path, "package/__main__.py", "print('main', __name__)")
    for module in ("package.train", "package"):
        ours = run(tmp_path, "-m", "trine", "run", "-m", module, "-m", "x")
        plain = run(tmp_path, "-m", module, "-m", "x")
        assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
        # runpy's own two frames are Python's, not the script's.
        assert without_our_line(ours.stderr).splitlines()[-1:] == plain.stderr.splitlines()[-1:]
        assert "trine/" not in without_our_line(ours.stderr)
        assert "profiler/launch.py" not in ours.stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], "trine run train.py"),
        (["missing.py"], "there is no script missing.py"),
        (["."], "is a folder"),
        (["-m", "missing.module"], "missing"),
        (["--config", "missing.toml", "script.py"], "missing.toml"),
        (["--config", "code.toml", "script.py"], "accumulation.steps"),
        (["--config", "both.toml", "script.py"], "compute.compile"),
        (["--config", "wrong.toml", "script.py"], "precision.dtipe"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(tmp_path: Path, command: list[str], words: str) -> None:
    write(tmp_path, "script.py", "print('ran')")
    write(tmp_path, "code.toml", "[accumulation]\nsteps = 4\n")
    write(tmp_path, "both.toml", '[precision]\ndtype = "bf16"\n[compute]\ncompile = "model"\n')
    write(tmp_path, "wrong.toml", '[precision]\ndtipe = "bf16"\n')
    done = run(tmp_path, "-m", "trine", "run", *command)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert words in done.stderr


def test_a_signal_from_outside_ends_it_as_python(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "import time\nprint('up', flush=True)\ntime.sleep(60)")
    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen(
            [sys.executable, "-m", "trine", "run", "script.py"],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == -number
        assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)


TRAINING = """
import os, sys
os.environ["TRINE_TEST_MARK"] = str("torch" in sys.modules)
import torch
from torch.utils.data import DataLoader, TensorDataset

print("torch before the script:", os.environ["TRINE_TEST_MARK"])


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.relu(self.linear(x))


torch.manual_seed(0)
model = torch.nn.Sequential(Block(), Block(), torch.nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(64, 16), torch.randint(0, 2, (64,))), batch_size=8)
for x, y in loader:
    out = model(x)
    loss = torch.nn.functional.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
import copy, pickle
copy.deepcopy(model), pickle.dumps(optimizer.state_dict())
print("loss", loss.item(), out.dtype, optimizer.param_groups[0].get("fused"), loader.num_workers)
if "fail" in sys.argv:
    raise ValueError("at the end")
"""


@pytest.mark.slow
def test_a_training_script_is_recorded_and_its_numbers_are_its_own(tmp_path: Path) -> None:
    write(tmp_path, "train.py", TRAINING)
    plain = run(tmp_path, "train.py", "fail")
    first = run(tmp_path, "-m", "trine", "run", "train.py", "fail")
    assert (first.returncode, first.stdout) == (plain.returncode, plain.stdout)
    assert without_our_line(first.stderr) == plain.stderr
    assert "torch before the script: False" in first.stdout
    assert "trine: recorded 8 steps in runs/train; read them with: trine analyze runs/train\n" in first.stderr
    rank = next(iter(trine.load(tmp_path / "runs" / "train")))
    assert rank.steps is not None
    assert len(rank.steps) == 8
    assert rank.metadata["state"] == "failed"


@pytest.mark.slow
def test_a_configuration_that_needs_no_code_is_applied(tmp_path: Path) -> None:
    write(tmp_path, "train.py", TRAINING)
    write(
        tmp_path,
        "tuned.toml",
        '[precision]\ndtype = "bf16"\n[compute]\nfuse = ["optimizer"]\n[data]\nworkers = 1\n',
    )
    done = run(tmp_path, "-m", "trine", "run", "-o", "tuned", "--config", "tuned.toml", "train.py")
    assert done.returncode == 0, done.stderr
    assert "torch.float32 True 1" in done.stdout  # outputs return to fp32
    rank = next(iter(trine.load(tmp_path / "tuned")))
    assert rank.metadata["configuration"] == {
        "precision": {"dtype": "bf16"},
        "compute": {"fuse": ["optimizer"]},
        "data": {"workers": 1},
    }
    assert rank.metadata["precision"]["autocast_dtype"] == "bfloat16"
    assert rank.metadata["optimizer"]["implementation"] == "fused"
    write(tmp_path, "attention.toml", '[compute]\nattention = "sdpa"\n')
    refused = run(tmp_path, "-m", "trine", "run", "--config", "attention.toml", "train.py")
    assert refused.returncode == 2
    assert "loss" not in refused.stdout  # before the first step
    assert refused.stderr.startswith("trine: compute.attention")
    assert len(refused.stderr.splitlines()) == 1


PARALLEL = """
import os, pathlib, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(6):
    model(torch.randn(4, 16)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
os.write(1, f"done {rank} {sys.argv[1:]}\\n".encode())  # one write: ranks share the pipe
if "fail" in sys.argv and rank == 1:
    # The launcher ends the other rank as soon as this one fails: wait until its record is closed.
    other = pathlib.Path("out/rank-00000/rank.json")
    for _ in range(300):
        if other.exists() and '"finished"' in other.read_text():
            break
        time.sleep(0.1)
    sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.parametrize(
    "natural",
    [
        pytest.param(True, id="trine run torchrun"),
        pytest.param(False, id="torchrun -m trine run", marks=pytest.mark.slow),
    ],
)
def test_under_torchrun_every_rank_is_recorded(tmp_path: Path, natural: bool) -> None:
    write(tmp_path, "ddp.py", PARALLEL)
    launcher = [
        "--nproc-per-node",
        "2",
        "--master-port",
        "0",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    ]
    if natural:
        command = ["-m", "trine", "run", "-o", "out", "torchrun", *launcher, "ddp.py"]
    else:
        command = ["-m", "torch.distributed.run", *launcher, "-m", "trine", "run", "-o", "out", "ddp.py"]
    done = run(tmp_path, *command, "--rate", "1", *(["fail"] if natural else []))
    assert (done.returncode == 0) == (not natural)
    if natural:
        assert "exitcode  : 3" in done.stderr
    assert "done 0 ['--rate', '1'" in done.stdout
    job = trine.load(tmp_path / "out")
    assert job.rank_ids == (0, 1)
    for rank in job:
        assert rank.steps is not None
        assert len(rank.steps) == 6
        assert rank.metadata["data_parallel"]["kind"] == "ddp"
        assert rank.collectives is not None
        assert {group.ranks for group in rank.groups} == {(0, 1)}


@pytest.mark.slow
def test_a_started_child_is_recorded_by_nobody_and_not_broken(tmp_path: Path) -> None:
    write(
        tmp_path,
        "spawn.py",
        "import torch\nimport torch.multiprocessing as mp\n\n\ndef work(rank):\n    model = torch.nn.Linear(2, 2)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n    for _ in range(3):\n"
        "        model(torch.ones(1, 2)).sum().backward()\n        optimizer.step()\n"
        "    print('trained', rank, flush=True)\n\n\nif __name__ == '__main__':\n    mp.spawn(work, nprocs=1)\n",
    )
    begun = time.monotonic()
    done = run(tmp_path, "-m", "trine", "run", "spawn.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["trained 0"]
    assert "processes that it started are not recorded" in done.stderr
    assert not (tmp_path / "runs").exists()
    assert time.monotonic() - begun < SECONDS
