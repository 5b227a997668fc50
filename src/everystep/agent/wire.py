"""Messages on a Unix stream socket: four bytes of length, then msgpack; a file descriptor travels with the length."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading

import msgspec

from everystep.agent import messages
from everystep.errors import AgentError

HELLO_NBYTES = 64 << 10
"""A first message is no longer than this: what a stranger may make us hold."""
MESSAGE_NBYTES = 1 << 30
_PIECE = 1 << 20
_LENGTH = struct.Struct("<I")

Anything = (
    messages.Hello | messages.Welcome | messages.ListSnapshots | messages.Snapshots | messages.TakeSnapshot | messages.SnapshotTaken
    | messages.Drain | messages.Drained | messages.Configure | messages.Prepare | messages.Lease | messages.SlabGranted | messages.NoSlab
    | messages.GiveBack | messages.Seal | messages.RecordMetrics | messages.ReleaseSnapshot | messages.Bye | messages.AskStats
    | messages.Stats | messages.Stop | messages.OpenPeers | messages.PeersOpened | messages.SetPeers | messages.Done | messages.Failed
    | messages.Event | messages.Consolidate | messages.Consolidating | messages.AskExport | messages.Export | messages.Ending
    | messages.ExportsFinished
)  # fmt: skip


class Channel:
    """One end of a connection. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Anything)

    def fileno(self) -> int:
        """Of the socket."""
        return self._sock.fileno()

    def peer(self) -> tuple[int, int]:
        """(pid, uid) of the process at the other end when it connected, as the kernel says."""
        pid, uid, _ = struct.unpack("3i", self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return pid, uid

    def timeout(self, seconds: float | None) -> None:
        """How long one receive or send may take; None: for ever."""
        self._sock.settimeout(seconds)

    def send(self, message: messages.Message, fd: int | None = None) -> None:
        """Send one message. OSError when the connection is gone."""
        body = self._encoder.encode(message)
        with self._sending:
            if fd is None and len(body) < _PIECE:
                self._sock.sendall(_LENGTH.pack(len(body)) + body)
                return
            head = _LENGTH.pack(len(body))
            if fd is None:
                self._sock.sendall(head)
            else:
                socket.send_fds(self._sock, [head], [fd])
            self._sock.sendall(body)

    def receive(self, *, limit: int = MESSAGE_NBYTES) -> tuple[Anything, int | None] | None:
        """The next message and the descriptor beside it; None at the end of the connection.

        Raises:
            AgentError: What came is not a message.
            OSError: The connection broke.
        """
        fds: list[int] = []
        try:
            head = self._exactly(4, fds)
            if head is None:
                return None
            (nbytes,) = _LENGTH.unpack(head)
            if nbytes > limit:
                raise AgentError(f"a message of {nbytes:,} bytes is longer than the {limit:,} allowed", kind="protocol")
            body = self._exactly(nbytes, fds)
            if body is None:
                return None
            try:
                message = self._decoder.decode(body)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise AgentError(f"a message cannot be understood: {error}", kind="protocol") from error
            return message, fds.pop() if fds else None
        finally:
            for fd in fds:
                os.close(fd)

    def _exactly(self, nbytes: int, fds: list[int]) -> bytearray | None:
        """``nbytes`` bytes, held only as they come in; None when the connection ends before."""
        got = bytearray()
        while len(got) < nbytes:
            # Room for two descriptors, so that one too many is seen and closed and not lost in the kernel's flags.
            data, ancillary, _, _ = self._sock.recvmsg(min(nbytes - len(got), _PIECE), socket.CMSG_SPACE(8), socket.MSG_CMSG_CLOEXEC)
            for level, kind, value in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds.extend(struct.unpack(f"{len(value) // 4}i", value[: len(value) // 4 * 4]))
            if not data:
                return None
            got += data
        return got

    def shut(self) -> None:
        """End the connection now; a receive that waits in another thread returns."""
        with contextlib.suppress(OSError):  # not connected any more
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, without ending a connection that a fork shares."""
        self._sock.close()
