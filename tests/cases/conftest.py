from support.small_search import search

__all__ = ["search"]
