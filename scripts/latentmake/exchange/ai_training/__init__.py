"""Exchange of caches with ai-training (github.com/ppbrown/ai-training)."""
