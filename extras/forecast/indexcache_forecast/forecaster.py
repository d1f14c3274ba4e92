"""The entry point of the group `indexcache.forecasts`."""

from __future__ import annotations

from indexcache_forecast.forecast import forecast
from indexcache_forecast.time_left import TimeLeft
from indexcache_search.searching.begin import Begun
from indexcache_search.searching.forecasts import Forecaster
from indexcache_search.searching.job import SearchJob


class StandInForecaster(Forecaster):
    """Runs a search ahead on a stand-in for its model."""

    def time_left(self, begun: Begun) -> TimeLeft:
        """See `Forecaster.time_left`."""
        return TimeLeft(begun)

    def estimate(self, job: SearchJob, hourly_price: float | None) -> str:
        """See `Forecaster.estimate`."""
        return forecast(job).as_text(hourly_price)
