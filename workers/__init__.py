"""The worker: one process that holds some of a model's layers and trains them as the coordinator says."""
