"""How one server is started, asked and stopped: data to argv; starts nothing itself."""
