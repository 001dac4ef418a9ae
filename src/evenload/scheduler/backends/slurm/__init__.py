"""The backend `slurm`: send a job file to Slurm, and run the program inside its allocation."""
