"""The attention backend that takes its width from the active tree, and a dense oracle for it."""
