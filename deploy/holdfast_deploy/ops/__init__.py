"""What a member tells the people who run it: log lines, a page, figures for Prometheus."""
