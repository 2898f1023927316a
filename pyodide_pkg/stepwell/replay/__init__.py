"""What a recorded session would have cost: traces replayed through every policy, without a GPU."""
