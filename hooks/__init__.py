"""Everything that touches SGLang. Its contract with the host is documented here."""
