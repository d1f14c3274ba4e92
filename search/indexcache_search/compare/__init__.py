"""Is one pattern, or one server, as good as another on data that nobody searched on?"""
