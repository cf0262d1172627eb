"""Stands in for a process that was forked elsewhere: CLIENT SOCKET PYTHON WORDS, WORDS being those of Python.

It lends its streams, waits, and ends as the other ends. Its own end, of whatever kind, closes the connection, which
ends the other.
"""

import json
import os
import signal
import socket
import sys

address, python, *words = sys.argv[1:]
link = socket.socket(socket.AF_UNIX)
link.connect(address)
folder = os.getcwd()  # noqa: PTH109 - pathlib would take as long to import as all else here
request = {"words": words, "folder": folder, "environment": dict(os.environ), "umask": os.umask(0o077)}
text = json.dumps(request).encode()
socket.send_fds(link, [len(text).to_bytes(8, "big")], [0, 1, 2])
link.sendall(text)
answer = link.recv(64).decode()
if answer == "cold":
    os.umask(request["umask"])
    os.execv(python, [python, *words])
code = int(answer or 1)
if code < 0:
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
