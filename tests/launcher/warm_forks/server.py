"""Imports the training libraries and forks for every start that a client asks for: SERVER SOCKET PROGRAM.

It ends when its standard input does. PROGRAM is what the forks take for their Python.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import types
from pathlib import Path

READ_ON_IMPORT = (
    "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TRL_", "DS_", "OMP_", "XDG_", "MALLOC_", "LD_",
    "TORCH_LOGS", "TORCH_COMPILE", "TORCHDYNAMO_", "TORCHINDUCTOR_",
)  # fmt: skip
"""Beginnings of the names of variables that the libraries, or the C runtime, read once."""
WANTED = (
    "accelerate.commands.launch",
    "datasets",
    "peft",
    "torch.distributed.run",
    "transformers.models.auto.modeling_auto",
    "trl.trainer.sft_trainer",
)


def told(environment, added):
    """What an environment says to the libraries; what they add themselves is in that of every child of a fork."""
    return {name: value for name, value in (added | environment).items() if name.startswith(READ_ON_IMPORT)}


def receive(link):
    """(the request, the three streams)."""
    head, streams, _, _ = socket.recv_fds(link, 8, 3)
    length, parts = int.from_bytes(head, "big"), []
    while length:
        part = link.recv(length)
        if not part:
            os._exit(1)
        parts.append(part)
        length -= len(part)
    return json.loads(b"".join(parts)), streams


def mind(link, asked, added, path, program):
    """Fork once more, for a process whose end can be waited for; return in that one alone, with what it shall run."""
    request, streams = receive(link)
    if told(request["environment"], added) != asked:
        link.sendall(b"cold")
        os._exit(0)
    child = os.fork()
    if child == 0:
        link.close()
        become(request, streams, added, path, program)
        return request["words"]
    for stream in (0, 1, 2, *streams):
        os.close(stream)
    watch = os.pidfd_open(child)
    ended, _, _ = select.select([watch, link], [], [])
    if watch not in ended:
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        link.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def become(request, streams, added, path, program):
    """Take over what a process inherits."""
    os.setsid()
    os.umask(request["umask"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(added)
    os.environ.update(request["environment"])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)
    sys.executable = program
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise


def run(words):
    """What Python does with its words: -u, then a module, a command or a script, and the rest for them."""
    while words[0] == "-u":
        words = words[1:]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        code = compile(words[1], "<string>", "exec")
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        main.__file__ = words[0]
        code = compile(Path(words[0]).read_bytes(), words[0], "exec")
    exec(code, main.__dict__)


def wait_for_starts(address, program):
    """Return in the forks alone, with what each shall run."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(16)
    before = dict(os.environ)
    for name in WANTED:
        importlib.import_module(name)
    added = {name: value for name, value in os.environ.items() if name not in before}
    path = sys.path[1:]
    # Objects that no collection looks at stay in pages that the forks share.
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    minders = set()
    while True:
        ready, _, _ = select.select([0, listener], [], [])
        minders -= {minder for minder in minders if os.waitpid(minder, os.WNOHANG)[0]}
        if 0 in ready:
            os._exit(0)
        link, _ = listener.accept()
        minder = os.fork()
        minders.add(minder)
        if minder == 0:
            listener.close()
            return mind(link, told(before, added), added, path, program)
        link.close()


def end(code):
    """What Python does before it takes every module apart, which would copy all that the forks share."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    os._exit(code)


def main():
    words = wait_for_starts(*sys.argv[1:])
    code = 0
    try:
        run(words)
    except SystemExit as error:
        code = error.code
        if code is None or isinstance(code, int):
            code = (code or 0) & 0xFF
        else:
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    end(code)


if __name__ == "__main__":
    main()
