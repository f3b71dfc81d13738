"""From Spark's partitions to tensors: shards, Arrow, a spool on local disk, shuffled batches."""
