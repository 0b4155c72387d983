from support.browser import browser
from support.stores import migrated_database, no_ambient_store, store

__all__ = ["browser", "migrated_database", "no_ambient_store", "store"]
