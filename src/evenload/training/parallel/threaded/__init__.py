"""Several replicas in one process, one thread each (`strategy="dp"`, `evenload.data_parallel`)."""
