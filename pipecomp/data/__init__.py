"""Data sets with stable sample ids: read, tokenized once, split, and planned into batches. Runs at the coordinator only."""
