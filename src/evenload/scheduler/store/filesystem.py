"""Check of the file system below a queue: SQLite's log needs shared memory and reliable locks.

https://www.sqlite.org/wal.html: "All processes using a database must be on the same host computer; WAL does not work
over a network filesystem."
"""

from __future__ import annotations

from pathlib import Path

from evenload.errors import ConfigError
from evenload.hardware import mount_of

_NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "coda", "ceph", "lustre", "gpfs", "beegfs", "orangefs",
    "pvfs2", "panfs", "wekafs", "glusterfs", "9p", "virtiofs", "vboxsf", "prl_fs", "vmhgfs", "ocfs2", "gfs", "gfs2",
}  # fmt: skip
_NETWORK_FUSE = {
    "sshfs", "glusterfs", "ceph", "cephfs", "s3fs", "gcsfuse", "goofys", "rclone", "mount-s3", "blobfuse", "blobfuse2",
    "juicefs", "seaweedfs", "moosefs", "mfs", "lizardfs", "hdfs", "davfs", "davfs2", "smbnetfs", "vmhgfs-fuse", "osxfs",
    "grpcfuse", "cvmfs2", "beegfs", "curlftpfs", "alluxio",
}  # fmt: skip


def refuse_network(folder: Path) -> None:
    """Raise `ConfigError` for a folder on a network file system; one whose file system is unknown is accepted."""
    mount = mount_of(folder)
    if mount is None:
        return
    family, _, inner = mount.fs_type.partition(".")
    if family in _NETWORK or (family == "fuse" and inner in _NETWORK_FUSE):
        raise ConfigError(
            f"the queue's folder {folder} lies on {mount.source}, mounted at {mount.point} as {mount.fs_type}, a network "
            f"file system: SQLite's write-ahead log needs memory that all its users share, and locks across machines "
            f"can't be relied on, so jobs could be lost or run twice. Put it on a local disk"
        )
