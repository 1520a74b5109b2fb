"""What the cluster counts and measures: the metrics' names, the numbers behind them, and how they are read."""
