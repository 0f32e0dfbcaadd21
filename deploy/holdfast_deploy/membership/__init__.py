"""Who takes part: rosters of members, how they agree on the next one, and what is written down of it."""
