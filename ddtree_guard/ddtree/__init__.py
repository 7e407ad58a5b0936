"""DDTree for stock SGLang: tree search, tree verification, and the plugin that registers them."""
