"""Which turn a request continues: messages without ids, clocks and telemetry; and what the model reads for them."""
