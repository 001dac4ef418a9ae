"""Which file system a folder lies on, and whether a queue may lie there: SQLite's log needs shared memory and real locks.

https://www.sqlite.org/wal.html: "All processes using a database must be on the same host computer; WAL does not work
over a network filesystem."
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evenload.errors import ConfigError

MOUNTS = Path("/proc/self/mounts")

_NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "coda", "ceph", "lustre", "gpfs", "beegfs", "orangefs",
    "pvfs2", "panfs", "wekafs", "glusterfs", "9p", "virtiofs", "vboxsf", "prl_fs", "vmhgfs", "ocfs2", "gfs", "gfs2",
}  # fmt: skip
_NETWORK_FUSE = {
    "sshfs", "glusterfs", "ceph", "cephfs", "s3fs", "gcsfuse", "goofys", "rclone", "mount-s3", "blobfuse", "blobfuse2",
    "juicefs", "seaweedfs", "moosefs", "mfs", "lizardfs", "hdfs", "davfs", "davfs2", "smbnetfs", "vmhgfs-fuse", "osxfs",
    "grpcfuse", "cvmfs2", "beegfs", "curlftpfs", "alluxio",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of the table of mounts."""

    source: str
    point: str
    kind: str

    @property
    def is_network(self) -> bool:
        """Whether other machines may hold the same files."""
        family, _, inner = self.kind.partition(".")
        return family in _NETWORK or (family == "fuse" and inner in _NETWORK_FUSE)


def mount_of(folder: Path, mounts: str) -> Mount | None:
    """The mount that holds `folder`, by the longest mount point above it; of several at one place the last, on top.

    Args:
        folder: an absolute path without links.
        mounts: text of /proc/self/mounts, in which blanks are written as octal numbers.
    """
    best: Mount | None = None
    for line in mounts.splitlines():
        fields = [_unescaped(field) for field in line.split(" ")]
        if len(fields) < 3:
            continue
        mount = Mount(*fields[:3])
        if folder.is_relative_to(mount.point) and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def refuse_network(folder: Path, mounts: Path = MOUNTS) -> None:
    """Refuses a folder on a network file system. Where the system has no table of mounts, nothing is known or refused.

    Raises:
        ConfigError: with the reason and what to do.
    """
    try:
        text = mounts.read_text(errors="surrogateescape")
    except OSError:
        return
    mount = mount_of(folder.resolve(), text)
    if mount is not None and mount.is_network:
        raise ConfigError(
            f"the queue's folder {folder} lies on {mount.source}, mounted at {mount.point} as {mount.kind}, a network "
            f"file system: SQLite's write-ahead log needs memory that all its users share, and locks across machines "
            f"can't be relied on, so jobs could be lost or run twice. Put it on a local disk"
        )


def _unescaped(field: str) -> str:
    for octal, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(octal, plain)
    return field
