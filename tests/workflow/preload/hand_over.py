"""Hands this process's command to one that has imported its libraries already; see fork_server.py.

Signals reach the process that carries it out; its exit status, or its signal, is this one's.
"""

import json
import os
import select
import signal
import socket


def hand_over(place, command):
    """Let the process at a socket carry out a command, and end as it; return where none is."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(place)
    except OSError:
        return  # nobody is there: this process does it
    mask = os.umask(0)
    os.umask(mask)
    data = json.dumps([command, os.getcwd(), dict(os.environ), mask]).encode(
        "utf-8", "surrogateescape"
    )
    socket.send_fds(connection, [len(data).to_bytes(8, "little")], [0, 1, 2])
    connection.sendall(data)
    job = int.from_bytes(connection.recv(8), "little")
    awake, waker = os.pipe()
    if job:
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker)  # or one that comes just before `select` would wait with it
        for number in (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGHUP,
            signal.SIGUSR1,
            signal.SIGUSR2,
        ):
            signal.signal(number, lambda number, _: os.kill(job, number))
        connection.sendall(b"1")  # the command may begin
    while connection not in select.select([connection, awake], [], [])[0]:
        os.read(awake, 1)
    status = connection.recv(8)  # of os.waitpid; nothing where that process is gone
    code = int.from_bytes(status, "little") if len(status) == 8 else 1 << 8
    if os.WIFSIGNALED(code):
        if os.WTERMSIG(code) != signal.SIGKILL:  # which has no handler
            signal.signal(os.WTERMSIG(code), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(code))
    os._exit(os.WEXITSTATUS(code))
