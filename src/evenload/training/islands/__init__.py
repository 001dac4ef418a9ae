"""Islands of strategy ``local``: their parts of each global batch, and their synchronisation."""
