"""What a draft head is: its config, its modules, how it is loaded, what it takes from its target."""
