"""What is measured and told to people. Nothing here answers anybody."""
