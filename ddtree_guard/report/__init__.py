"""What people see: terminal output and HTML."""
