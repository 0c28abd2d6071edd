-- Takes jobs: first those whose lease has expired, then new ones.
-- KEYS: streams, in the order in which they are served.
-- ARGV: group, consumer, number of jobs to start, number of jobs to hold after these, idle time (ms) after which a lease has expired
-- (0: skip expired leases), wire version, number of streams after which reading ends as soon as there is a new job.
-- Returns the time in ms, then {stream number, entry id, fields, deliveries, 1 if the delivery is counted} of each job. Skips
-- entries that a worker handed back because their version is newer than ours.
local group, me, lease, version, certain = ARGV[1], ARGV[2], tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local starts, left = tonumber(ARGV[3]), tonumber(ARGV[3]) + tonumber(ARGV[4])
local now = redis.call('TIME')
local found = {string.format('%d', now[1] * 1000 + math.floor(now[2] / 1000))}
local function add(number, entry, deliveries, counted)
  found[#found + 1] = {number, entry[1], entry[2], deliveries, counted}
  left = left - 1
  starts = starts - 1
end
for number, stream in ipairs(KEYS) do
  local first = '-'
  while lease > 0 and left > 0 and first do
    local page = redis.call('XPENDING', stream, group, 'IDLE', lease, first, '+', left)
    first = #page == left and '(' .. page[#page][1]
    for _, pending in ipairs(page) do
      if (tonumber(string.match(pending[2], '^version (%d+)$')) or 0) <= version then
        local counted = starts > 0 and 1 or 0
        local entry = redis.call('XCLAIM', stream, group, me, lease, pending[1], 'RETRYCOUNT', pending[4] + counted)
        if entry[1] and entry[1][2] then add(number, entry[1], pending[4] + 1, counted) end
      end
    end
  end
end
local claimed = #found
for number, stream in ipairs(KEYS) do
  if left > 0 and (number <= certain or #found == claimed) then
    local read = redis.call('XREADGROUP', 'GROUP', group, me, 'COUNT', left, 'STREAMS', stream, '>')
    for _, entry in ipairs(read and read[1][2] or {}) do add(number, entry, 1, 1) end
  end
end
return found
