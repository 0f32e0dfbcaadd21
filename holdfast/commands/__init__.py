"""What the commands of the command line do; ``holdfast.cli`` only parses their arguments."""
