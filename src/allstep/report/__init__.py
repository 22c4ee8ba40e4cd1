"""What happened, in numbers with units: records, means and rates, and where they are shown and kept."""
