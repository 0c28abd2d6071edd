-- Takes jobs: first those whose lease has expired, then new ones.
-- KEYS: streams, in the order in which they are served.
-- ARGV: group, consumer, maximum number of jobs, idle time (ms) after which a lease has expired (0: skip expired leases), wire version.
-- Returns the time in ms, then {stream number, entry id, fields, deliveries} of each job. Skips entries that a worker handed back
-- because their version is newer than ours.
local group, me, left, lease, version = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local now = redis.call('TIME')
local found = {string.format('%d', now[1] * 1000 + math.floor(now[2] / 1000))}
local function add(number, entry, deliveries)
  found[#found + 1] = {number, entry[1], entry[2], deliveries}
  left = left - 1
end
for number, stream in ipairs(KEYS) do
  local first = '-'
  while lease > 0 and left > 0 and first do
    local page = redis.call('XPENDING', stream, group, 'IDLE', lease, first, '+', left)
    first = #page == left and '(' .. page[#page][1]
    for _, pending in ipairs(page) do
      if (tonumber(string.match(pending[2], '^version (%d+)$')) or 0) <= version then
        local claimed = redis.call('XCLAIM', stream, group, me, lease, pending[1])
        if claimed[1] and claimed[1][2] then add(number, claimed[1], pending[4] + 1) end
      end
    end
  end
end
for number, stream in ipairs(KEYS) do
  if left > 0 then
    local read = redis.call('XREADGROUP', 'GROUP', group, me, 'COUNT', left, 'STREAMS', stream, '>')
    for _, entry in ipairs(read and read[1][2] or {}) do add(number, entry, 1) end
  end
end
return found
