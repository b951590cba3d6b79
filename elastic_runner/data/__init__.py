"""Sample order, partition over logical shards, loading, and the ledger."""
